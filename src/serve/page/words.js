// The text of a corrected answer, which the model writes from the corrected mask. For runs whose words follow masks.

import { Failure, ask } from "./api.js";

/** Time without a stroke after which the model writes: a correction has several strokes. */
const PAUSE_MS = 700;

const NOTES = {
  follows: "The model writes this text anew from the corrected mask. Text that you type stays.",
  own: "This is your text, and it stays as it is. The button replaces it.",
  writing: "Writing the text from the mask…",
  empty: "The mask is empty: there is nothing to describe. Write the text yourself.",
  failed: "The model could not write the text. Check the text yourself, or try the button again.",
};

export class Words {
  /** `failed(error)` receives failures. */
  constructor(failed) {
    this.failed = failed;
    this.editing = null;
    this.timer = null;
    this.request = null;
    /** Resolves to whether the text is written. */
    this.written = null;
  }

  /** Begins to follow the mask of a correction: `{card, mask}` of an image. */
  begin(image, editing) {
    this.editing = { image, ...editing };
    const { card } = editing;
    if (!card.hasOwnText) card.editor.value = card.text.textContent;
    card.part(".write").hidden = false;
    this.typed();
  }

  end() {
    this.stop();
    this.editing = null;
  }

  stop() {
    clearTimeout(this.timer);
    if (this.request) this.request.abort();
    this.timer = this.request = this.written = null;
  }

  /** The user typed. */
  typed() {
    if (this.editing) this.note(this.editing.card.hasOwnText ? "own" : "follows");
  }

  /** A stroke ended, or was taken back. */
  changed() {
    this.stop();
    if (this.editing) this.timer = setTimeout(() => this.follow(), PAUSE_MS);
  }

  /** Writes the text anew unless it is the user's. */
  follow() {
    const { card, mask } = this.editing;
    this.stop();
    if (card.hasOwnText) {
      this.note("own");
    } else if (mask.equals(card.mask)) {
      card.editor.value = card.text.textContent;
      this.note("follows");
    } else {
      this.write();
    }
  }

  /** Writes the text anew, in place of any text. */
  write() {
    this.stop();
    if (this.editing.mask.area === 0) {
      this.note("empty");
      return;
    }
    this.note("writing");
    this.request = new AbortController();
    this.written = this.put(this.editing, this.request.signal);
  }

  /** Waits until the text follows the mask as it is; false if that failed. */
  async settle() {
    if (this.timer !== null) this.follow();
    const { written } = this;
    const isWritten = written === null || (await written);
    const isChanged = this.timer !== null || (this.written !== null && this.written !== written);
    return isChanged ? this.settle() : isWritten;
  }

  async put({ image, card, mask }, signal) {
    const before = card.editor.value;
    try {
      const text = await describe(image, card.answer, mask, signal);
      if (signal.aborted) return false;
      // the user may have typed meanwhile
      if (card.editor.value === before) {
        card.editor.value = text;
        card.written.add(text);
      }
      this.typed();
      return true;
    } catch (error) {
      if (signal.aborted) return false;
      this.stop();
      this.note("failed");
      this.failed(error);
      return false;
    }
  }

  note(name) {
    this.editing.card.part(".words-note").textContent = NOTES[name];
  }
}

/** The model's words for a mask, about the slice and the question of an answer. The server keeps no answer. */
async function describe(image, answer, mask, signal) {
  const form = new FormData();
  form.set("question", answer.question);
  form.set("slice", answer.slice);
  if (answer.window !== null) form.set("window", answer.window);
  form.set("keep", "false");
  form.set("mask", await mask.toBlob(), "mask.png");
  let text = null;
  await ask(image, form, signal, (name, data) => {
    if (name === "error") throw new Failure(data.error, data.hint, data.status);
    if (name === "result") text = data.answer.trim();
  });
  if (text === null) throw new Failure("the connection ended before the answer", "try again");
  return text;
}
