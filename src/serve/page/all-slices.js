// A question about all slices of a volume: its options, and the masks of its answer by slice.

const $ = (id) => document.getElementById(id);

/** The options under the question. */
export class AllSlices {
  constructor() {
    this.image = null;
    $("all-slices").addEventListener("change", () => this.show());
  }

  /** Shows the options for a volume with several slices. */
  open(image) {
    this.image = image;
    $("scope").hidden = image.axis === null || image.slices === 1;
    $("all-slices").checked = false;
    $("all-axis").value = image.axis || "axial";
    $("all-first").value = "";
    $("all-last").value = "";
    $("all-every").value = 1;
    this.show();
  }

  close() {
    $("scope").hidden = true;
    $("all-slices").checked = false;
    this.show();
  }

  toggle() {
    if ($("scope").hidden || $("all-slices").disabled) return;
    $("all-slices").checked = !$("all-slices").checked;
    this.show();
  }

  show() {
    const isChosen = $("all-slices").checked;
    $("all-options").hidden = !isChosen;
    $("question-label").textContent = isChosen ? "Question about all slices" : "Question about the image";
  }

  setDisabled(isDisabled) {
    for (const control of $("scope").querySelectorAll("input, select")) control.disabled = isDisabled;
  }

  /** The options for the server; `null` for a question about one slice. Slices count from 1 on the page, from 0 there. */
  options() {
    if ($("scope").hidden || !$("all-slices").checked) return null;
    const number = (id, otherwise) => ($(id).value === "" ? otherwise : Number($(id).value));
    const [first, last] = [number("all-first", 1), number("all-last", "")];
    return {
      axis: $("all-axis").value,
      slices: `${Math.max(0, first - 1)}..${last}`,
      every: number("all-every", 1),
      cleanup: {
        largest_component: $("all-largest").checked,
        min_volume_ml: number("all-min-volume", 0),
        fill_gaps: number("all-gaps", 0),
      },
    };
  }
}

/** One sentence about the slices and the clean-up of an answer. */
export function describe({ axis, slices, every, cleanup }) {
  const [first, last] = slices.split("..").map((text) => (text === "" ? null : Number(text)));
  const isAll = first === 0 && last === null;
  const range = isAll ? `All ${axis} slices` : `The ${axis} slices from ${first + 1} to ${last === null ? "the last" : last}`;
  const parts = [every > 1 ? `${range}, one in ${every}` : range];
  if (cleanup.fill_gaps > 0) parts.push(`gaps up to ${cleanup.fill_gaps} filled`);
  if (cleanup.min_volume_ml > 0) parts.push(`parts below ${cleanup.min_volume_ml} ml removed`);
  if (cleanup.largest_component) parts.push("largest part only");
  return `${parts.join("; ")}.`;
}

/** Masks by slice, loaded when a slice is shown. */
export class SliceMasks {
  /** `load(slice)` resolves to a mask; `on` has callbacks: `loaded()`, `failed(error)`. */
  constructor(load, on) {
    this.load = load;
    this.on = on;
    this.masks = new Map();
    this.wanted = null;
    this.isLoading = false;
  }

  /** The mask of a slice; `null` while it is loaded. */
  at(slice) {
    const mask = this.masks.get(slice);
    if (mask) return mask;
    this.wanted = slice;
    this.fetch();
    return null;
  }

  /** Loads the newest slice that is wanted; while one is on its way, the others are skipped. */
  async fetch() {
    if (this.isLoading) return;
    this.isLoading = true;
    try {
      while (this.wanted !== null) {
        const slice = this.wanted;
        this.wanted = null;
        this.masks.set(slice, await this.load(slice));
        this.on.loaded();
      }
    } catch (error) {
      this.on.failed(error);
    } finally {
      this.isLoading = false;
    }
  }
}
