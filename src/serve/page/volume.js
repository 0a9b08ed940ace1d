// Slices and intensity window of the open image. An image file has one slice and no window.

import { request } from "./api.js";
import { Newest } from "./newest.js";

const PRESETS = ["auto", "soft-tissue", "lung", "brain", "bone", "abdomen", "liver", "mediastinum", "stroke", "subdural", "angiography"];

/** The window is that of the class which the question is about. */
const BY_QUESTION = "by the question";

const $ = (id) => document.getElementById(id);

export class Volume {
  /** `on` has callbacks: `failed(error)`, `changed()` when another slice or window is shown. */
  constructor(viewer, on) {
    this.viewer = viewer;
    this.on = on;
    this.image = null;
    this.slice = 0;
    this.window = null;
    /** Whether the window is the user's choice, or the only one of the run. */
    this.isChosen = true;
    this.pixels = new Newest(() => this.image && this.load(true), on.failed);
    $("slice").addEventListener("input", () => this.setSlice(Number($("slice").value)));
    $("window-preset").addEventListener("change", () => this.setWindow($("window-preset").value));
    for (const id of ["window-width", "window-level"]) {
      const shown = (of) => Number($(of).value || $(of).placeholder);
      $(id).addEventListener("change", () => this.setLevels(shown("window-width"), shown("window-level")));
    }
  }

  async open(image) {
    this.image = image;
    this.slice = Math.floor((image.slices - 1) / 2);
    this.window = image.window;
    this.isChosen = image.window_choices.length === 0;
    $("volume").hidden = image.slices === 1 && image.window === null;
    $("window-controls").hidden = image.window === null;
    $("slice").max = image.slices - 1;
    $("seg").hidden = !image.exports.includes("mask.dcm");
    const choices = image.window_choices;
    const own = [...choices.map(({ window }) => window), image.window].filter((name) => name !== null && !PRESETS.includes(name));
    const names = [...new Set([...own, ...PRESETS, "W/L"])].map((name) => new Option(name, name));
    const open = choices.length ? [new Option(BY_QUESTION, BY_QUESTION)] : [];
    $("window-preset").replaceChildren(...open, ...names);
    const list = choices.map(({ class: name, window }) => `${window} for ${name}`).join(", ");
    $("window-note").hidden = !choices.length;
    $("window-note").textContent = `The training images have different windows: ${list}. A question of the `
      + "training decides the window if all of its classes have the same one. For another question choose the window below the image.";
    this.showControls();
    await this.load(false);
  }

  close() {
    this.image = null;
    $("window-note").hidden = true;
    $("volume").hidden = true;
    this.viewer.show(null, null, false);
  }

  /** The view that a question is about. */
  view() {
    return { slice: this.slice, ...this.windowOf() };
  }

  /** The window of a question; images have none. */
  windowOf() {
    return this.window === null || !this.isChosen ? {} : { window: this.window };
  }

  /** Shows the window of an answer, if its question decided it. */
  showAnswered(answer) {
    const window = answer.scope === "volume" ? answer.settings.window : answer.window;
    if (this.isChosen || !window || window === this.window) return;
    this.window = window;
    this.show();
  }

  /** Whether an answer is about the shown slice. */
  shows(answer) {
    return answer.slice === this.slice;
  }

  goTo(answer) {
    if (!this.shows(answer)) this.setSlice(answer.slice);
  }

  /** Shows another slice; false for an image with one slice. */
  step(by) {
    if (!this.image || this.image.slices === 1) return false;
    this.setSlice(this.slice + by);
    return true;
  }

  setSlice(slice) {
    this.slice = Math.min(this.image.slices - 1, Math.max(0, slice));
    this.show();
  }

  setWindow(window) {
    if (window === "W/L") return;
    this.isChosen = window !== BY_QUESTION;
    if (this.isChosen) this.window = window;
    this.show();
  }

  setLevels(width, level) {
    this.isChosen = true;
    this.window = `${Math.max(1, Math.round(width))}/${Math.round(level)}`;
    this.show();
  }

  /** Changes the window by a drag with the right button. */
  drag(across, down) {
    if (!this.image || this.image.window === null) return;
    const shown = (id) => Number($(id).value || $(id).placeholder);
    const [width, level] = [shown("window-width") || 400, shown("window-level")];
    const step = Math.max(0.5, width / 300);
    this.setLevels(width + across * step, level + down * step);
  }

  /** Shows another slice or window. */
  show() {
    this.showControls();
    this.on.changed();
    this.pixels.refresh();
  }

  showControls() {
    $("slice").value = this.slice;
    $("slice-number").textContent = `${this.slice + 1} / ${this.image.slices}`;
    if (this.window === null) return;
    const isNamed = [...$("window-preset").options].some((option) => option.value === this.window);
    const shown = this.isChosen ? this.window : BY_QUESTION;
    $("window-preset").value = isNamed || !this.isChosen ? shown : "W/L";
    const [width, level] = isNamed || !this.isChosen ? ["", ""] : this.window.split("/");
    $("window-width").value = width;
    $("window-level").value = level;
  }

  async load(keepsPlace) {
    const { id, spacing_mm: spacing } = this.image;
    const window = this.window === null ? "" : `&window=${encodeURIComponent(this.window)}`;
    const response = await request(`api/images/${id}/pixels?slice=${this.slice}${window}`);
    const levels = response.headers.get("prsmed-window");
    const [width, level] = levels ? levels.split("/").map((number) => Number(Number(number).toPrecision(4))) : ["", ""];
    $("window-width").placeholder = width;
    $("window-level").placeholder = level;
    this.viewer.show(await createImageBitmap(await response.blob()), spacing, keepsPlace);
  }
}
