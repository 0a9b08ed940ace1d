// The files of an image of several sequences: a place for each.

import { zipped } from "./zip.js";

const $ = (id) => document.getElementById(id);

export class Sequences {
  /** `opened(form)` gets the files as a form, with the bytes of all. */
  constructor({ opened, failed }) {
    this.places = [];
    $("sequences-cancel").addEventListener("click", () => $("sequences").close());
    $("sequences").querySelector("form").addEventListener("submit", async (event) => {
      event.preventDefault();
      try {
        const form = await this.form();
        $("sequences").close();
        await opened(form);
      } catch (error) {
        $("sequences").close();
        failed(error);
      }
    });
  }

  /** Whether the images of the model have several sequences. */
  get areAsked() {
    return this.places.length > 0;
  }

  /** Makes a place for each name. */
  setNames(names) {
    this.places = names.map((name) => {
      const element = $("sequence").content.firstElementChild.cloneNode(true);
      element.querySelector("span").textContent = name;
      const [file, missing] = element.querySelectorAll("input");
      missing.addEventListener("change", () => {
        file.disabled = missing.checked;
        this.update();
      });
      file.addEventListener("change", () => this.update());
      return { name, element, file, missing };
    });
    $("sequence-files").replaceChildren(...this.places.map((place) => place.element));
  }

  /** Asks for the files. A dropped file goes to the sequence whose name alone is in its name. */
  ask(dropped) {
    for (const { name, file, missing } of this.places) {
      [file.value, file.disabled, missing.checked] = ["", false, false];
      const fit = dropped.filter((other) => this.nameOf(other) === name);
      if (fit.length !== 1) continue;
      const chosen = new DataTransfer();
      chosen.items.add(fit[0]);
      file.files = chosen.files;
    }
    this.update();
    $("sequences").showModal();
  }

  /** The longest name of a sequence that a file's name has. */
  nameOf(file) {
    const names = this.places.map(({ name }) => name).filter((name) => file.name.toLowerCase().includes(name.toLowerCase()));
    return names.sort((a, b) => b.length - a.length)[0];
  }

  update() {
    const isSaid = ({ file, missing }) => missing.checked || file.files.length > 0;
    const isAny = this.places.some(({ missing }) => !missing.checked);
    $("sequences-open").disabled = !isAny || !this.places.every(isSaid);
  }

  /** A field for each sequence: its file, the zip of a series, or the text `none`. */
  async form() {
    const form = new FormData();
    for (const { name, file, missing } of this.places) {
      const files = [...file.files];
      if (missing.checked) form.append(`image.${name}`, "none");
      else form.append(`image.${name}`, files.length > 1 ? await zipped(files) : files[0], "file");
    }
    return form;
  }
}
