// The other two planes of a volume, with a cross where all three meet. A click moves the cross.

import { getBlob } from "./api.js";
import { Newest } from "./newest.js";
import { Viewer } from "./viewer.js";

const $ = (id) => document.getElementById(id);
const WIDE_PX = 900;

/** One plane: its slider, its pixels, its masks. */
class Plane {
  /** `on` has callbacks: `failed(error)`, `picked([x, y, slice])` in this plane. */
  constructor(number, on) {
    this.slider = $(`plane-${number}-slice`);
    this.name = $(`plane-${number}-name`);
    this.canvas = $(`plane-${number}`);
    this.at = [0, 0, 0];
    this.viewer = new Viewer(this.canvas, {
      moved: () => {},
      painted: () => {},
      windowed: () => {},
      picked: (x, y) => this.direction && on.picked([x, y, this.at[2]]),
      scrolled: (step) => {
        this.pick(this.at[2] + step, on);
        return true;
      },
    });
    this.slider.addEventListener("input", () => this.pick(Number(this.slider.value), on));
    this.pixels = new Newest(() => this.load(), on.failed);
  }

  pick(slice, on) {
    const last = this.direction.slices - 1;
    on.picked([this.at[0], this.at[1], Math.min(last, Math.max(0, slice))]);
  }

  open(image, direction) {
    Object.assign(this, { image, direction });
    this.name.textContent = direction.axis;
    this.canvas.setAttribute("aria-label", `${direction.axis} slice through the cross`);
    this.slider.max = direction.slices - 1;
    this.slider.setAttribute("aria-label", `${direction.axis} slice`);
    this.viewer.show(null, null, false);
  }

  /** Moves the cross to a point of this plane: column, row, slice. */
  moveTo(at, window) {
    const isOther = this.at[2] !== at[2] || this.window !== window || !this.viewer.image;
    Object.assign(this, { at, window });
    this.slider.value = at[2];
    this.viewer.setCross([at[0], at[1]]);
    if (isOther) this.pixels.refresh();
  }

  async load() {
    const { image, direction, at, window } = this;
    if (!image) return;
    const query = `axis=${direction.axis}&slice=${at[2]}${window === null ? "" : `&window=${encodeURIComponent(window)}`}`;
    const pixels = await createImageBitmap(await getBlob(`api/images/${image.id}/pixels?${query}`));
    if (this.image === image) this.viewer.show(pixels, direction.spacing_mm, true);
  }
}

export class Planes {
  /** `on` has callbacks: `failed(error)`, `moved([x, y, slice])` in the image, `opened()` when the planes are shown. */
  constructor(main, on) {
    this.main = main;
    this.on = on;
    this.image = null;
    this.at = [0, 0, 0];
    this.isWanted = window.innerWidth > WIDE_PX;
    this.planes = [0, 1].map((number) => new Plane(number, {
      failed: on.failed,
      picked: (at) => on.moved(this.inImage(this.planes[number].direction, at)),
    }));
    $("planes-shown").addEventListener("click", () => {
      this.isWanted = !this.isWanted;
      this.showControls();
      on.opened();
    });
  }

  /** Opens a volume; images and single slices have no other planes. */
  open(image) {
    const others = (image ? image.directions : []).filter((direction) => direction.axis !== image.axis);
    this.image = others.length === 2 ? image : null;
    this.planes.forEach((plane, number) => (this.image ? plane.open(image, others[number]) : (plane.image = null)));
    if (this.image) this.at = [Math.floor(image.width / 2), Math.floor(image.height / 2), 0];
    this.showControls();
  }

  get isShown() {
    return this.image !== null && this.isWanted;
  }

  showControls() {
    $("planes-shown").hidden = this.image === null;
    $("planes-shown").setAttribute("aria-pressed", String(this.isShown));
    $("planes").hidden = !this.isShown;
    if (!this.isShown) this.main.setCross(null);
  }

  /** Moves the cross to a point of the image. */
  moveTo(at, window) {
    if (!this.image) return;
    const sizes = [this.image.width, this.image.height, this.image.slices];
    this.at = at.map((value, place) => Math.min(sizes[place] - 1, Math.max(0, Math.floor(value))));
    if (!this.isShown) return;
    this.main.setCross([this.at[0], this.at[1]]);
    for (const plane of this.planes) {
      const inPlane = plane.direction.along.map(({ place, backwards }) => (backwards ? sizes[place] - 1 - this.at[place] : this.at[place]));
      plane.moveTo(inPlane, window);
    }
  }

  /** A point of a plane as column, row and slice of the image. */
  inImage(direction, at) {
    const { width, height, slices } = this.image;
    const sizes = [width, height, slices];
    const found = [0, 0, 0];
    direction.along.forEach(({ place, backwards }, i) => {
      const value = Math.floor(at[i]);
      found[place] = backwards ? sizes[place] - 1 - value : value;
    });
    return found;
  }

  /** Draws masks as another viewer does. */
  setStyle({ visible, opacity, outline }) {
    for (const { viewer } of this.planes) {
      Object.assign(viewer, { visible, opacity, outline });
      viewer.draw();
    }
  }

  /** Draws masks: `layers(axis, slice)` gives those of a slice, from bottom to top. */
  setLayers(layers) {
    if (!this.isShown) return;
    for (const { viewer, direction, at } of this.planes) viewer.setLayers(layers(direction.axis, at[2]));
  }
}
