// A mask: one byte for each pixel of the image, 0 or 1, with its drawing and its strokes.

const STROKES = 30;

export class Mask {
  constructor(width, height, pixels) {
    this.width = width;
    this.height = height;
    this.pixels = pixels || new Uint8Array(width * height);
    this.strokes = [];
    this.drawn = null;
  }

  /** Reads a PNG with 0 and 255. */
  static async read(blob) {
    const bitmap = await createImageBitmap(blob);
    const canvas = new OffscreenCanvas(bitmap.width, bitmap.height);
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.drawImage(bitmap, 0, 0);
    const { data } = context.getImageData(0, 0, bitmap.width, bitmap.height);
    const pixels = new Uint8Array(bitmap.width * bitmap.height);
    for (let i = 0; i < pixels.length; i++) pixels[i] = data[4 * i] > 127 ? 1 : 0;
    return new Mask(bitmap.width, bitmap.height, pixels);
  }

  copy() {
    return new Mask(this.width, this.height, this.pixels.slice());
  }

  equals(other) {
    return this.pixels.every((value, i) => value === other.pixels[i]);
  }

  get area() {
    return this.pixels.reduce((sum, value) => sum + value, 0);
  }

  /** A PNG with 0 and 255. */
  async toBlob() {
    const canvas = new OffscreenCanvas(this.width, this.height);
    const image = new ImageData(this.width, this.height);
    const words = new Uint32Array(image.data.buffer);
    const [black, white] = new Uint32Array(new Uint8Array([0, 0, 0, 255, 255, 255, 255, 255]).buffer);
    this.pixels.forEach((value, i) => { words[i] = value ? white : black; });
    canvas.getContext("2d").putImageData(image, 0, 0);
    return canvas.convertToBlob({ type: "image/png" });
  }

  /** Canvases of the filled mask and of its outline in a colour `[r, g, b]`. */
  layers(colour) {
    if (this.drawn && this.drawn.colour === colour.join()) return this.drawn;
    const { width, height, pixels } = this;
    const [fill, outline] = [new ImageData(width, height), new ImageData(width, height)];
    const [filled, lined] = [fill, outline].map((image) => new Uint32Array(image.data.buffer));
    const word = new Uint32Array(new Uint8Array([...colour, 255]).buffer)[0];
    const thickness = Math.max(1, Math.round(Math.max(width, height) / 300));
    for (let y = 0, i = 0; y < height; y++) {
      for (let x = 0; x < width; x++, i++) {
        if (!pixels[i]) continue;
        filled[i] = word;
        if (this.isBorder(x, y, thickness)) lined[i] = word;
      }
    }
    const canvas = (image) => {
      const made = new OffscreenCanvas(width, height);
      made.getContext("2d").putImageData(image, 0, 0);
      return made;
    };
    this.drawn = { colour: colour.join(), fill: canvas(fill), outline: canvas(outline) };
    return this.drawn;
  }

  isBorder(x, y, thickness) {
    const { width, height, pixels } = this;
    if (x < thickness || y < thickness || x >= width - thickness || y >= height - thickness) return true;
    for (let step = 1; step <= thickness; step++) {
      const i = y * width + x;
      if (!(pixels[i - step] && pixels[i + step] && pixels[i - step * width] && pixels[i + step * width])) return true;
    }
    return false;
  }

  /** Begins a stroke, which `undo` takes back. */
  begin() {
    this.strokes.push({ before: this.pixels.slice() });
    if (this.strokes.length > STROKES) this.strokes.shift();
  }

  /** Paints a disc at pixel coordinates. */
  paint(x, y, radius, value) {
    const { width, height, pixels } = this;
    for (let row = Math.max(0, Math.floor(y - radius)); row <= Math.min(height - 1, y + radius); row++) {
      for (let column = Math.max(0, Math.floor(x - radius)); column <= Math.min(width - 1, x + radius); column++) {
        if ((column + 0.5 - x) ** 2 + (row + 0.5 - y) ** 2 <= radius ** 2) pixels[row * width + column] = value;
      }
    }
    this.drawn = null;
  }

  undo() {
    const stroke = this.strokes.pop();
    if (stroke) this.pixels = stroke.before;
    this.drawn = null;
  }
}
