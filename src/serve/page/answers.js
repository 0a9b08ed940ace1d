// The list of answers: one card for each question.

import { describe } from "./all-slices.js";

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

/** Characters above which a question is folded to three lines. */
const FOLDED = 160;

/** Position of an empty mask. */
const NO_POSITION = "none, it is empty";

export const css = (colour) => `rgb(${colour.join(" ")})`;

/** A card of a question. `on` has callbacks for its buttons, with the names of the list in the constructor. */
export class Card {
  constructor(number, question, on) {
    this.colour = COLOURS[number % COLOURS.length];
    this.answer = null;
    /** The mask of an answer about one slice. */
    this.mask = null;
    /** The texts of the editor that the model wrote from corrected masks. */
    this.written = new Set();
    /** The masks by slice of an answer about all slices. */
    this.masks = null;
    this.element = document.getElementById("answer").content.firstElementChild.cloneNode(true);
    this.element.style.setProperty("--colour", css(this.colour));
    this.text = this.part(".text");
    this.shown = this.part(".shown");
    this.editor = this.part(".edit-text textarea");
    this.part(".question").textContent = question;
    this.part(".more").hidden = question.length <= FOLDED;
    this.part(".question").classList.toggle("folded", question.length > FOLDED);
    this.part(".more").addEventListener("click", () => {
      const isFolded = this.part(".question").classList.toggle("folded");
      this.part(".more").textContent = isFolded ? "Show all" : "Show less";
      this.part(".more").setAttribute("aria-expanded", String(!isFolded));
    });
    this.text.classList.add("working");
    this.shown.addEventListener("change", () => on.toggle(this));
    this.editor.addEventListener("input", () => on.typed(this));
    for (const [name, action] of [
      [".correct", on.correct], [".get-mask", on.mask], [".get-overlay", on.overlay], [".get-pair", on.pair],
      [".go-to", on.goTo], [".get-nifti", on.nifti], [".get-seg", on.seg], [".remove", on.remove], [".write", on.write],
    ]) {
      this.part(name).addEventListener("click", () => action(this));
      this.part(name).setAttribute("aria-label", `${this.part(name).lastChild.textContent.trim()}: ${question}`);
    }
  }

  part(selector) {
    return this.element.querySelector(selector);
  }

  add(text) {
    this.text.textContent += text;
  }

  /** Shows the mask of an answer that has no words yet. */
  paint(mask, position) {
    this.mask = mask;
    this.showFacts([["Position of the mask", position || NO_POSITION]]);
  }

  /** Whether the user typed the text of the editor: it is neither the model's answer nor written from a mask. */
  get hasOwnText() {
    const text = this.editor.value.trim();
    return text !== "" && !this.written.has(text) && text !== this.answer.answer.trim();
  }

  /** Shows a complete answer of the server. */
  finish(answer) {
    this.answer = answer;
    this.text.classList.remove("working");
    this.text.textContent = answer.corrected_answer || answer.answer;
    this.part(".source").hidden = !this.isVolume;
    this.part(".source").textContent = this.isVolume ? this.source() : "";
    this.editor.value = this.text.textContent;
    const [own, other] = this.isVolume ? ["volume", "slice"] : ["slice", "volume"];
    for (const button of this.element.querySelectorAll(`.of-${own}`)) button.hidden = false;
    for (const button of this.element.querySelectorAll(`.of-${other}`)) button.hidden = true;
    this.part(".go-to").disabled = this.isVolume && answer.largest_slice === null;
    this.part(".actions").hidden = false;
    const isGood = this.isFamiliar && this.isConsistent;
    this.part(".unlike").hidden = isGood;
    this.part(".unlike").textContent = isGood ? "" : this.warning();
    const isUnknown = answer.question_known === null && answer.image_known !== false && !answer.view_differs && this.isConsistent;
    this.part(".unlike").classList.toggle("unknown", isUnknown);
    this.showFacts();
  }

  /** Whether the answer is about all slices of a volume. */
  get isVolume() {
    return this.answer !== null && this.answer.scope === "volume";
  }

  /** Which slices an answer about all slices is about, and who wrote it. */
  source() {
    const numbers = this.answer.answer_facts ? " Its slice numbers start at 0, those of the page at 1." : "";
    return `${describe(this.answer.settings)} A ${this.answer.answer_source} wrote this text from the mask, not the model.${numbers}`;
  }

  /** Whether question and image are like those of the training. Runs of old versions cannot tell. */
  get isFamiliar() {
    return this.answer.question_known === true && this.answer.image_known !== false && !this.answer.view_differs;
  }

  /** Whether the words fit the mask and the question, as far as the server can tell. */
  get isConsistent() {
    const { position_warning: position, mask_warning: mask, other_target: target } = this.answer;
    return position === null && !mask && target === null;
  }

  /** What is wrong with a question or an image that is not familiar, or with the words of the answer. */
  warning() {
    const ofWords = [this.sentence("mask_warning"), this.sentence("position_warning"), this.targetWarning()];
    return [...ofWords, this.imageWarning(), this.questionWarning()].filter(Boolean).join(" ");
  }

  /** A warning of the server as a sentence. */
  sentence(name) {
    const text = this.answer[name];
    return text ? `${text[0].toUpperCase()}${text.slice(1).replaceAll("`", "")}.` : "";
  }

  targetWarning() {
    const { other_target: target, other_target_classes: classes } = this.answer;
    if (target === null) return "";
    return `The answer is about ${target}, which the question does not ask about (the training has it in questions about `
      + `${classes.join(", ")}). Do not rely on the answer and the mask.`;
  }

  imageWarning() {
    // another window changes how the image looks
    if (this.answer.view_differs) return `The model saw ${this.answer.view_differs}. Do not rely on the answer and the mask.`;
    if (this.answer.image_known !== false) return "";
    return `This image looks unlike those of the training (most of all its ${this.answer.image_differs}). `
      + "Do not rely on the answer and the mask.";
  }

  questionWarning() {
    if (this.answer.question_known === true) return "";
    const { question_known: isKnown, new_words: words, nearest_question: nearest, question_classes: classes } = this.answer;
    if (isKnown === null) {
      const reason = nearest === null
        ? "The questions of the training are not known"
        : "The run has no validation questions to compare with";
      return `${reason}. The page cannot say whether this question is like those of the training.`;
    }
    if (classes.length) {
      return `The training has this question about ${classes.join(", ")} only, and this image looks like another class. `
        + "Do not rely on the answer and the mask.";
    }
    const reason = words.length ? ` (no training question has: ${words.join(", ")})` : "";
    return `This question is unlike those of the training${reason}. Do not rely on the answer and the mask. `
      + `The nearest training question is: ${nearest}`;
  }

  /** The style of a finding: an answer to an unfamiliar question, or one that differs from its mask, is not shown as a good one. */
  style(isFound) {
    if (!this.isFamiliar || !this.isConsistent) return "";
    return isFound ? "yes" : "no";
  }

  showFacts(facts = this.isVolume ? this.volumeFacts() : this.sliceFacts()) {
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

  volumeFacts() {
    const { volume_ml: ml, raw_volume_ml: raw, num_found: found, num_slices: all, range } = this.answer;
    const facts = [["Volume", `${ml.toFixed(2)} ml`]];
    if (Math.abs(raw - ml) > 1e-9) facts.push(["Before the clean-up", `${raw.toFixed(2)} ml`]);
    facts.push(["Found in", `${found} of ${all} slice${all === 1 ? "" : "s"}`, this.style(found > 0)]);
    if (range) facts.push(["Mask in slices", `${range[0] + 1} to ${range[1] + 1}`]);
    const { mask_position: position, mask_position_slice: largest } = this.answer;
    if (position !== null) facts.push([`Mask in ${this.answer.settings.axis} slice ${largest + 1}, the largest`, position]);
    return facts;
  }

  /** Area and probabilities. The area is that of the mask that is shown. */
  sliceFacts() {
    const { answer, mask } = this;
    const facts = [];
    // a correction changes the mask, not what the model found
    const of = answer.corrected ? " of the model" : "";
    // a mask that was sent with the question has no confidence
    const { presence, is_found: isFound, foreground } = answer.confidence || { presence: null, is_found: true, foreground: null };
    if (presence !== null) facts.push([`Presence${of}`, `${isFound ? "found" : "not found"} (${presence.toFixed(2)})`, this.style(isFound)]);
    const scale = mask && answer.area_frac > 0 && answer.area_mm2 ? answer.area_mm2 / answer.area_frac : this.imageMm2;
    const share = mask ? mask.area / mask.pixels.length : answer.area_frac;
    const area = (share > 0 && share < 5e-5 ? "less than 0.01 %" : `${(100 * share).toFixed(2)} %`) + (scale ? `, ${Math.round(share * scale)} mm²` : "");
    facts.push([answer.corrected ? "Area (corrected)" : "Area", area]);
    const regions = answer.mask_regions.length ? `, between its ${answer.mask_regions.length} regions (${answer.mask_regions.join(", ")})` : "";
    facts.push(["Position of the mask", answer.mask_position ? `${answer.mask_position}${regions}` : NO_POSITION]);
    facts.push(["Position in the answer", answer.answer_position || "none"]);
    if (foreground !== null && isFound) facts.push([`Mean probability${of}`, foreground.toFixed(2)]);
    if (answer.class) facts.push(["Class", `${answer.class.name} (${answer.class.probability.toFixed(2)})`]);
    return facts;
  }

  /** One sentence for people who do not see the page. */
  spoken() {
    return this.isFamiliar && this.isConsistent ? this.summary() : `${this.warning()} ${this.summary()}`;
  }

  summary() {
    const { answer } = this;
    if (this.isVolume) return `${answer.answer} ${this.source()}`;
    const isFound = !answer.confidence || answer.confidence.is_found;
    return `${answer.answer} ${isFound ? `Area ${(100 * answer.area_frac).toFixed(1)} percent.` : "Not found."}`;
  }

  setEditing(isEditing) {
    this.element.classList.toggle("editing", isEditing);
    this.part(".edit-text").hidden = !isEditing;
    this.part(".actions").hidden = isEditing;
  }
}
