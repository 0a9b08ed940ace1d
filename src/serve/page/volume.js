// Slices and intensity window of the open image. An image file has one slice and no window.

import { request } from "./api.js";
import { Newest } from "./newest.js";

const PRESETS = ["auto", "soft-tissue", "lung", "brain", "bone", "abdomen", "liver", "mediastinum", "stroke", "subdural", "angiography"];

const $ = (id) => document.getElementById(id);

export class Volume {
  /** `on` has callbacks: `failed(error)`, `changed()` when another slice or window is shown. */
  constructor(viewer, on) {
    this.viewer = viewer;
    this.on = on;
    this.image = null;
    this.slice = 0;
    this.window = null;
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
    $("volume").hidden = image.slices === 1 && image.window === null;
    $("window-controls").hidden = image.window === null;
    $("slice").max = image.slices - 1;
    $("seg").hidden = !image.exports.includes("mask.dcm");
    const own = image.window === null || PRESETS.includes(image.window) ? [] : [image.window];
    $("window-preset").replaceChildren(...[...own, ...PRESETS, "W/L"].map((name) => new Option(name, name)));
    this.showControls();
    await this.load(false);
  }

  close() {
    this.image = null;
    $("volume").hidden = true;
    this.viewer.show(null, null, false);
  }

  /** The view that a question is about. */
  view() {
    return { slice: this.slice, ...this.windowOf() };
  }

  /** The window of a question; images have none. */
  windowOf() {
    return this.window === null ? {} : { window: this.window };
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
    this.window = window;
    this.show();
  }

  setLevels(width, level) {
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
    $("window-preset").value = isNamed ? this.window : "W/L";
    const [width, level] = isNamed ? ["", ""] : this.window.split("/");
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
