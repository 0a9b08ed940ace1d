// The image with its masks on a canvas: zoom, move, brush. It knows no server.

const MAX_ZOOM = 40;
/** A pointer that moves less between down and up clicks. */
const CLICK_PX = 4;

export class Viewer {
  /** `canvas` fills its parent. `on` has callbacks: `moved(x, y)`, `painted()`, `windowed(across, down)`, `scrolled(n)`,
   * `picked(x, y)` for a click without a brush. */
  constructor(canvas, on) {
    this.canvas = canvas;
    this.on = on;
    this.image = null;
    this.spacing = null;
    this.layers = [];
    this.opacity = 0.35;
    this.outline = true;
    this.visible = true;
    this.zoom = 1;
    this.centre = [0, 0];
    this.brush = null;
    this.cross = null;
    this.pointer = null;
    this.isDrawing = false;
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    canvas.addEventListener("pointerdown", (event) => this.down(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, (event) => this.up(event));
    canvas.addEventListener("pointerleave", () => this.leave());
    canvas.addEventListener("contextmenu", (event) => event.preventDefault());
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  /** Shows an image (`ImageBitmap`), from the start or in the same place. `spacing` is the size of a pixel in mm. */
  show(image, spacing, keepsPlace) {
    const isSameSize = this.image && image && this.image.width === image.width && this.image.height === image.height;
    this.image = image;
    this.spacing = spacing;
    if (!(keepsPlace && isSameSize)) this.fit();
    this.draw();
  }

  /** Masks from bottom to top: `{mask, colour}`. */
  setLayers(layers) {
    this.layers = layers;
    this.draw();
  }

  /** Marks a pixel with two lines; `null` removes them. */
  setCross(cross) {
    this.cross = cross;
    this.draw();
  }

  /** Begins to correct a mask: `{mask, colour, radius, value}`; `null` ends it. */
  setBrush(brush) {
    this.brush = brush;
    this.pointer = brush && this.image ? [this.image.width / 2, this.image.height / 2] : null;
    this.draw();
  }

  fit() {
    this.zoom = 1;
    this.centre = this.image ? [this.image.width / 2, this.image.height / 2] : [0, 0];
    this.draw();
  }

  zoomBy(factor, at) {
    if (!this.image) return;
    const before = at && this.toImage(at);
    this.zoom = Math.min(MAX_ZOOM, Math.max(1, this.zoom * factor));
    if (before) {
      const after = this.toImage(at);
      this.centre = [this.centre[0] + before[0] - after[0], this.centre[1] + before[1] - after[1]];
    }
    this.keepInside();
    this.draw();
  }

  /** Pixels of the screen for a pixel of the image, across and down. Pixels that are not square keep their form. */
  scale() {
    const { clientWidth, clientHeight } = this.canvas;
    const [x, y] = this.spacing || [1, 1];
    const aspect = [x / Math.min(x, y), y / Math.min(x, y)];
    const fit = Math.min(clientWidth / (this.image.width * aspect[0]), clientHeight / (this.image.height * aspect[1]));
    return [fit * aspect[0] * this.zoom, fit * aspect[1] * this.zoom];
  }

  toImage([x, y]) {
    const [across, down] = this.scale();
    const { clientWidth, clientHeight } = this.canvas;
    return [this.centre[0] + (x - clientWidth / 2) / across, this.centre[1] + (y - clientHeight / 2) / down];
  }

  keepInside() {
    const [width, height] = [this.image.width, this.image.height];
    if (this.zoom === 1) this.centre = [width / 2, height / 2];
    this.centre = [Math.min(width, Math.max(0, this.centre[0])), Math.min(height, Math.max(0, this.centre[1]))];
  }

  draw() {
    if (this.isQueued) return;
    this.isQueued = true;
    requestAnimationFrame(() => {
      this.isQueued = false;
      this.drawNow();
    });
  }

  drawNow() {
    const { canvas, image } = this;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(canvas.clientWidth * ratio);
    canvas.height = Math.round(canvas.clientHeight * ratio);
    if (!image || !canvas.width || !canvas.height) return;
    const context = canvas.getContext("2d");
    const [across, down] = this.scale();
    const left = canvas.clientWidth / 2 - this.centre[0] * across;
    const top = canvas.clientHeight / 2 - this.centre[1] * down;
    context.setTransform(across * ratio, 0, 0, down * ratio, left * ratio, top * ratio);
    context.imageSmoothingQuality = "high";
    context.imageSmoothingEnabled = true;
    context.drawImage(image, 0, 0);
    context.imageSmoothingEnabled = false;
    if (this.visible) {
      for (const { mask, colour } of this.layers) {
        const layers = mask.layers(colour);
        context.globalAlpha = this.opacity;
        context.drawImage(layers.fill, 0, 0);
        context.globalAlpha = 1;
        if (this.outline) context.drawImage(layers.outline, 0, 0);
      }
    }
    if (this.brush && this.pointer) this.drawBrush(context, across * ratio);
    if (this.cross && !this.brush) {
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.fillStyle = "rgb(255 255 255 / .55)";
      context.fillRect(left, top + (this.cross[1] + 0.5) * down - 0.5, image.width * across, 1);
      context.fillRect(left + (this.cross[0] + 0.5) * across - 0.5, top, 1, image.height * down);
    }
  }

  drawBrush(context, scale) {
    const [x, y] = this.pointer;
    for (const [width, colour] of [[3, "rgb(0 0 0 / .7)"], [1.4, this.brush.value ? "#ffffff" : "#ffb4a8"]]) {
      context.lineWidth = width / scale;
      context.strokeStyle = colour;
      context.beginPath();
      context.arc(x, y, this.brush.radius, 0, 2 * Math.PI);
      context.stroke();
    }
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  down(event) {
    if (!this.image) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.start = { at: this.at(event), centre: this.centre, button: event.button };
    if (this.brush && event.button === 0) {
      this.brush.mask.begin();
      this.isDrawing = true;
      this.last = null;
      this.paintTo(this.toImage(this.at(event)));
    }
  }

  move(event) {
    if (!this.image) return;
    const at = this.at(event);
    const point = this.toImage(at);
    this.pointer = this.brush ? point : null;
    this.on.moved(...point);
    if (this.isDrawing) this.paintTo(point);
    else if (this.start && this.start.button === 2) {
      this.on.windowed(at[0] - this.start.at[0], at[1] - this.start.at[1]);
      this.start.at = at;
    } else if (this.start) {
      const [across, down] = this.scale();
      this.centre = [
        this.start.centre[0] - (at[0] - this.start.at[0]) / across,
        this.start.centre[1] - (at[1] - this.start.at[1]) / down,
      ];
      this.keepInside();
    }
    this.draw();
  }

  up(event) {
    const at = this.at(event);
    if (this.isDrawing) this.on.painted();
    else if (this.start && this.start.button === 0 && this.image) {
      const [x, y] = this.toImage(at);
      const isClick = Math.hypot(at[0] - this.start.at[0], at[1] - this.start.at[1]) < CLICK_PX;
      if (isClick && x >= 0 && y >= 0 && x < this.image.width && y < this.image.height) this.on.picked(x, y);
    }
    this.isDrawing = false;
    this.start = null;
    if (this.canvas.hasPointerCapture(event.pointerId)) this.canvas.releasePointerCapture(event.pointerId);
  }

  leave() {
    if (!this.isDrawing) this.pointer = null;
    this.on.moved(null, null);
    this.draw();
  }

  wheel(event) {
    if (!this.image) return;
    event.preventDefault();
    if (event.ctrlKey || !this.on.scrolled(Math.sign(event.deltaY))) {
      this.zoomBy(event.deltaY < 0 ? 1.2 : 1 / 1.2, this.at(event));
    }
  }

  /** Arrows move the image, or the brush; the space bar paints. */
  key(event) {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!this.image || event.ctrlKey || event.altKey || event.metaKey) return;
    if (this.brush && event.key === " ") {
      event.preventDefault();
      this.pointer = this.pointer || [...this.centre];
      this.brush.mask.begin();
      this.last = null;
      this.paintTo(this.pointer);
      this.on.painted();
    } else if (step) {
      event.preventDefault();
      const size = event.shiftKey ? 10 : 1;
      if (this.brush) {
        const [x, y] = this.pointer || this.centre;
        this.pointer = [
          Math.min(this.image.width, Math.max(0, x + step[0] * size)),
          Math.min(this.image.height, Math.max(0, y + step[1] * size)),
        ];
        this.on.moved(...this.pointer);
      } else {
        this.centre = [this.centre[0] + 4 * step[0] * size, this.centre[1] + 4 * step[1] * size];
        this.keepInside();
      }
    }
    this.draw();
  }

  /** Paints a line of discs from the last point, so that a fast stroke has no gaps. */
  paintTo([x, y]) {
    const { mask, radius, value } = this.brush;
    const [fromX, fromY] = this.last || [x, y];
    const steps = Math.max(1, Math.ceil(Math.hypot(x - fromX, y - fromY) / Math.max(0.5, radius / 3)));
    for (let i = 1; i <= steps; i++) {
      mask.paint(fromX + ((x - fromX) * i) / steps, fromY + ((y - fromY) * i) / steps, radius, value);
    }
    this.last = [x, y];
    this.pointer = [x, y];
    this.draw();
  }
}
