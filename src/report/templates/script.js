'use strict';
document.documentElement.classList.add('has-script');

// Sorts a table by the column of a header button. Empty cells stay last.
function sortBy(button) {
  const header = button.closest('th');
  const table = header.closest('table');
  const column = [...header.parentElement.children].indexOf(header);
  const isDescending = header.getAttribute('aria-sort') === 'ascending';
  for (const other of header.parentElement.children) other.removeAttribute('aria-sort');
  header.setAttribute('aria-sort', isDescending ? 'descending' : 'ascending');
  const key = (row) => row.children[column].dataset.sort ?? row.children[column].textContent.trim();
  const isNumeric = header.classList.contains('number');
  const compare = (a, b) => {
    if (a === '' || b === '') return (a === '') - (b === '');
    const order = isNumeric ? Number(a) - Number(b) : a.localeCompare(b, undefined, { numeric: true });
    return isDescending ? -order : order;
  };
  const body = table.tBodies[0];
  const rows = [...body.rows].map((row) => [key(row), row]);
  rows.sort((a, b) => compare(a[0], b[0]));
  body.append(...rows.map((pair) => pair[1]));
}

for (const button of document.querySelectorAll('th button')) button.addEventListener('click', () => sortBy(button));

// Shows the rows of the table of questions that fit all filters.
const filters = document.querySelector('.filters');
if (filters) {
  const rows = [...document.querySelectorAll('#questions-table tbody tr')];
  const texts = rows.map((row) => row.textContent.toLowerCase());
  const update = () => {
    const words = filters.querySelector('#filter-text').value.toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = [...filters.querySelectorAll('select')].filter((select) => select.value !== '');
    let shown = 0;
    rows.forEach((row, index) => {
      const fits = words.every((word) => texts[index].includes(word)) &&
        chosen.every((select) => row.dataset[select.name] === select.value);
      row.hidden = !fits;
      shown += fits;
    });
    filters.querySelector('output').value = `${shown} of ${rows.length} questions`;
  };
  filters.addEventListener('input', update);
  filters.addEventListener('submit', (event) => event.preventDefault());
  update();
}
