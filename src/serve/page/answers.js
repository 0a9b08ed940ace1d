// The list of answers: one card for each question.

/** Colours of masks (Okabe and Ito): distinct with every kind of colour vision. The first is that of `prsmed predict`. */
const COLOURS = [
  [40, 150, 255],
  [230, 159, 0],
  [0, 178, 129],
  [224, 121, 177],
  [240, 228, 66],
  [232, 94, 0],
  [150, 132, 255],
];

export const css = (colour) => `rgb(${colour.join(" ")})`;

/** A card of a question. `on` has callbacks for its buttons: `toggle`, `correct`, `mask`, `overlay`, `pair`, `remove`. */
export class Card {
  constructor(number, question, on) {
    this.colour = COLOURS[number % COLOURS.length];
    this.answer = null;
    this.mask = null;
    this.element = document.getElementById("answer").content.firstElementChild.cloneNode(true);
    this.element.style.setProperty("--colour", css(this.colour));
    this.text = this.part(".text");
    this.shown = this.part(".shown");
    this.editor = this.part(".edit-text textarea");
    this.part(".question").textContent = question;
    this.text.classList.add("working");
    this.shown.addEventListener("change", () => on.toggle(this));
    for (const [name, action] of [
      [".correct", on.correct], [".get-mask", on.mask], [".get-overlay", on.overlay], [".get-pair", on.pair],
      [".remove", on.remove],
    ]) {
      this.part(name).addEventListener("click", () => action(this));
      this.part(name).setAttribute("aria-label", `${this.part(name).textContent}: ${question}`);
    }
  }

  part(selector) {
    return this.element.querySelector(selector);
  }

  add(text) {
    this.text.textContent += text;
  }

  /** Shows a complete answer of the server. */
  finish(answer) {
    this.answer = answer;
    this.text.classList.remove("working");
    this.text.textContent = answer.corrected_answer || answer.answer;
    this.editor.value = this.text.textContent;
    this.part(".actions").hidden = false;
    this.showFacts();
  }

  /** Area and confidence. The area is that of the mask that is shown. */
  showFacts() {
    const { answer, mask } = this;
    const { presence, is_found: isFound, foreground } = answer.confidence;
    const facts = [];
    facts.push(["Presence", `${isFound ? "found" : "not found"} (${presence.toFixed(2)})`, isFound ? "yes" : "no"]);
    const scale = mask && answer.area_frac > 0 && answer.area_mm2 ? answer.area_mm2 / answer.area_frac : this.imageMm2;
    const share = mask ? mask.area / mask.pixels.length : answer.area_frac;
    const area = `${(100 * share).toFixed(2)} %` + (scale ? `, ${Math.round(share * scale)} mm²` : "");
    facts.push([answer.corrected ? "Area (corrected)" : "Area", area]);
    if (foreground !== null && isFound) facts.push(["Confidence", foreground.toFixed(2)]);
    if (answer.class) facts.push(["Class", `${answer.class.name} (${answer.class.probability.toFixed(2)})`]);
    this.part(".facts").replaceChildren(...facts.map(([name, value, kind]) => {
      const box = document.createElement("div");
      const [term, detail] = [document.createElement("dt"), document.createElement("dd")];
      term.textContent = name;
      detail.textContent = value;
      if (kind) detail.className = kind;
      box.append(term, detail);
      return box;
    }));
  }

  /** One sentence for people who do not see the page. */
  spoken() {
    const { answer, is_found: isFound } = { answer: this.answer, ...this.answer.confidence };
    return `${answer.answer} ${isFound ? `Area ${(100 * answer.area_frac).toFixed(1)} percent.` : "Not found."}`;
  }

  setEditing(isEditing) {
    this.element.classList.toggle("editing", isEditing);
    this.part(".edit-text").hidden = !isEditing;
    this.part(".actions").hidden = isEditing;
  }
}
