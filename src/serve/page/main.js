// The page of `prsmed serve`: open an image, ask, look, correct, download.

import { AllSlices, SliceMasks } from "./all-slices.js";
import { Failure, ask, getBlob, getJson, onTokenNeeded, request, save } from "./api.js";
import { Card } from "./answers.js";
import { Mask } from "./mask.js";
import { Planes } from "./planes.js";
import { Sequences } from "./sequences.js";
import { Viewer } from "./viewer.js";
import { Volume } from "./volume.js";
import { Words } from "./words.js";
import { filesOf, zipped } from "./zip.js";

const IMAGE_KEY = "prsmed-image";
const KEYS_KEY = "prsmed-keys";

const $ = (id) => document.getElementById(id);

const state = { model: null, image: null, cards: [], asking: null, editing: null, hasUnsaved: false };

const viewer = new Viewer($("view"), {
  moved: showCursor,
  painted: showStrokes,
  windowed: (across, down) => volume.drag(across, down),
  scrolled: (step) => volume.step(step),
  picked: (x, y) => moveCross([x, y, volume.slice]),
});

const volume = new Volume(viewer, { failed: showError, changed: () => moveCross([...planes.at.slice(0, 2), volume.slice]) });

const planes = new Planes(viewer, { failed: showError, moved: moveCross, opened: () => moveCross(planes.at) });

const allSlices = new AllSlices();

const words = new Words(showError);

const sequences = new Sequences({ opened: (form) => attempt(() => send(form)), failed: showError });

function showError(error) {
  if (error.name === "AbortError") return;
  const isKnown = error instanceof Failure;
  $("alert-text").textContent = isKnown ? error.message : `the page failed: ${error.message}`;
  $("alert-hint").textContent = isKnown ? error.hint : "load the page again";
  $("alert").hidden = false;
}

/** Moves the point where the planes of a volume meet: column, row and slice of the image. */
function moveCross(at) {
  planes.moveTo(at, volume.window);
  if (at[2] === volume.slice) showMasks();
  else volume.setSlice(at[2]);
}

function clearError() {
  $("alert").hidden = true;
}

/** Runs an action; shows its failure. */
async function attempt(action) {
  clearError();
  try {
    return await action();
  } catch (error) {
    showError(error);
    return undefined;
  }
}

const path = (card, rest) => `api/images/${state.image.id}/answers/${card.answer.id}${rest}`;

// Images

/** Opens one file, or the files of a DICOM series. */
async function upload(files) {
  if (!files.length) return;
  if (sequences.areAsked) {
    sequences.ask(files);
    return;
  }
  await attempt(async () => {
    if (files.length > 1) setStatus("packing…");
    await send(files.length > 1 ? await zipped(files) : files[0]);
  });
}

/** Sends a file, or the files of a form, and shows the image. */
async function send(content) {
  if (state.hasUnsaved && !confirm("The corrected masks of this image were not downloaded. Open another one?")) {
    setStatus("");
    return;
  }
  const files = content instanceof FormData ? [...content.values()].filter((value) => value instanceof Blob) : [content];
  const size = files.reduce((sum, file) => sum + file.size, 0);
  if (state.model && size > state.model.limits.upload_bytes) {
    const most = (state.model.limits.upload_bytes / 2 ** 20).toFixed(0);
    throw new Failure(`the file is too large: at most ${most} MiB are allowed`, "make it smaller, or start the server with --max-upload");
  }
  setStatus("uploading…");
  const image = await getJson("api/images", { method: "POST", body: content }).finally(() => setStatus(""));
  const old = state.image;
  await openImage(image);
  if (old) await request(`api/images/${old.id}`, { method: "DELETE" }).catch(() => {});
}

/** Lets the user choose files. */
function choose() {
  if (sequences.areAsked) sequences.ask([]);
  else $("file").click();
}

async function openImage(image) {
  stop();
  endCorrection();
  state.cards = [];
  $("answers").replaceChildren();
  state.image = image;
  state.hasUnsaved = false;
  sessionStorage.setItem(IMAGE_KEY, image.id);
  allSlices.open(image);
  await volume.open(image);
  planes.open(image);
  $("empty").hidden = true;
  $("view").hidden = false;
  viewer.fit();
  const size = `${image.width} × ${image.height} pixels`;
  const mm = image.spacing_mm ? `, ${image.spacing_mm.map((value) => value.toFixed(2)).join(" × ")} mm` : "";
  const colours = image.sequences.map(({ name }, index) => `${name} ${["red", "green", "blue"][index]}`).join(", ");
  $("image-facts").textContent = size + mm + (image.slices > 1 ? `, ${image.slices} slices` : "") + (colours ? `, ${colours}` : "");
  $("view").setAttribute("aria-label", `Image of ${size}. Arrow keys move it.`);
  $("question").disabled = false;
  $("send").disabled = false;
  for (const answer of image.answers) {
    const card = addCard(answer.question);
    card.finish(answer);
    await loadMask(card);
  }
  moveCross([...planes.at.slice(0, 2), volume.slice]);
  $("question").focus();
}

function closeImage() {
  stop();
  endCorrection();
  sessionStorage.removeItem(IMAGE_KEY);
  Object.assign(state, { image: null, cards: [], hasUnsaved: false });
  $("answers").replaceChildren();
  allSlices.close();
  planes.open(null);
  volume.close();
  $("view").hidden = true;
  $("empty").hidden = false;
  $("image-facts").textContent = "";
  $("question").disabled = true;
  $("send").disabled = true;
  showMasks();
  $("choose").focus();
}

// Questions

function addCard(question) {
  const number = state.cards.length ? state.cards[state.cards.length - 1].number + 1 : 0;
  const card = new Card(number, question, {
    toggle: showMasks,
    correct: beginCorrection,
    typed: (card) => isEdited(card) && words.typed(),
    write: (card) => isEdited(card) && attempt(() => words.write()),
    mask: (card) => download(path(card, "/mask"), `mask-${card.number + 1}.png`),
    overlay: (card) => download(path(card, `/overlay${card.isVolume ? `?slice=${volume.slice}` : ""}`), `overlay-${card.number + 1}.png`),
    goTo: (card) => volume.setSlice(card.answer.largest_slice),
    nifti: (card) => downloadVolume("mask.nii.gz", card),
    seg: (card) => downloadVolume("mask.dcm", card),
    pair: (card) => downloadPairs(`?answer=${card.answer.id}`, `pair-${card.number + 1}.zip`),
    remove: removeCard,
  });
  card.number = number;
  const spacing = state.image.spacing_mm;
  card.imageMm2 = spacing && spacing[0] * spacing[1] * state.image.width * state.image.height;
  card.part(".get-seg").disabled = !state.image.exports.includes("mask.dcm");
  state.cards.push(card);
  $("answers").prepend(card.element);
  return card;
}

/** Loads the mask of an answer; of an answer about all slices, that of each slice when it is shown. */
async function loadMask(card) {
  // another image may be open when a slice arrives
  const address = path(card, "/mask");
  if (card.isVolume) {
    const failed = (error) => state.cards.includes(card) && showError(error);
    const along = (axis) => {
      const load = async (slice) => Mask.read(await getBlob(`${address}?slice=${slice}${axis}`));
      return new SliceMasks(load, { loaded: showMasks, failed });
    };
    card.masks = along("");
    card.planes = Object.fromEntries(state.image.directions.map(({ axis }) => [axis, along(`&axis=${axis}`)]));
    return;
  }
  card.mask = await Mask.read(await getBlob(address));
  card.showFacts();
}

async function submit(event) {
  event.preventDefault();
  const question = $("question").value.trim();
  if (!question || !state.image || state.asking) return;
  endCorrection();
  const card = addCard(question);
  state.asking = new AbortController();
  setAsking(true);
  const whole = allSlices.options();
  const about = whole ? { volume: whole, ...volume.windowOf() } : volume.view();
  await attempt(async () => {
    card.slice = about.slice;
    await ask(state.image.id, { question, ...about }, state.asking.signal, (name, data) => receive(card, name, data));
    if (!card.answer) throw new Failure("the connection ended before the answer", "ask again");
    volume.showAnswered(card.answer);
    await loadMask(card);
    $("spoken").textContent = card.spoken();
    // on a narrow screen the card is below the image
    card.element.scrollIntoView({ block: "nearest" });
    $("question").value = "";
    showMasks();
  });
  if (!card.answer) dropCard(card);
  state.asking = null;
  setAsking(false);
}

function receive(card, name, data) {
  if (name === "queued") setStatus(data.ahead > 0 ? `waiting: ${data.ahead} before this question` : "waiting for the model");
  if (name === "started") setStatus("reading the image and the question");
  if (name === "mask") showPainted(card, data).catch(showError);
  if (name === "token") {
    setStatus("answering");
    card.add(data.text);
  }
  if (name === "progress") showProgress(data.done, data.total);
  if (name === "result") card.finish(data);
  if (name === "error") throw new Failure(data.error, data.hint, data.status);
}

/** Draws the mask of an answer whose words are not there yet. */
async function showPainted(card, { png, mask_position: position }) {
  const bytes = Uint8Array.from(atob(png), (letter) => letter.charCodeAt(0));
  const mask = await Mask.read(new Blob([bytes], { type: "image/png" }));
  if (card.answer || !state.cards.includes(card)) return;
  card.paint(mask, position);
  showMasks();
}

/** The slices that are done. The status says it once, so that screen readers do not read every number. */
function showProgress(done, total) {
  if (done === 0) setStatus("segmenting the slices");
  $("progress").hidden = false;
  $("progress-bar").max = total;
  $("progress-bar").value = done;
  $("progress-text").textContent = `${done} of ${total} slice${total === 1 ? "" : "s"}`;
}

function setStatus(text) {
  $("status").textContent = text;
}

function setAsking(isAsking) {
  $("send").disabled = isAsking || !state.image;
  $("stop").hidden = !isAsking;
  $("progress").hidden = true;
  allSlices.setDisabled(isAsking);
  setStatus("");
}

function stop() {
  if (state.asking) state.asking.abort();
}

function dropCard(card) {
  state.cards = state.cards.filter((other) => other !== card);
  card.element.remove();
  showMasks();
}

async function removeCard(card) {
  await attempt(async () => {
    await request(path(card, ""), { method: "DELETE" });
    if (isEdited(card)) endCorrection();
    dropCard(card);
    $("question").focus();
  });
}

/** Draws the masks of the shown slice. */
function showMasks() {
  const { editing } = state;
  const maskOf = (card) => {
    if (editing) return editing.card === card && volume.shows(card.answer) ? editing.mask : null;
    if (!card.shown.checked) return null;
    if (card.masks) return card.masks.at(volume.slice);
    return card.mask && volume.shows(card.answer || card) ? card.mask : null;
  };
  const layers = state.cards.map((card) => ({ mask: maskOf(card), colour: card.colour }));
  viewer.setLayers(layers.filter((layer) => layer.mask));
  const whole = state.cards.filter((card) => card.masks && card.shown.checked && !editing);
  planes.setLayers((axis, slice) => whole.map((card) => ({ mask: card.planes[axis].at(slice), colour: card.colour })).filter((layer) => layer.mask));
  $("all").hidden = !state.cards.some((card) => card.answer) && !state.image;
  $("pairs").disabled = !state.cards.some((card) => card.answer && !card.isVolume);
}

// Corrections

function beginCorrection(card) {
  if (!card.mask || state.asking) return;
  endCorrection();
  volume.goTo(card.answer);
  state.editing = { card, mask: card.mask.copy() };
  card.setEditing(true);
  if (state.model && state.model.reads_masks) words.begin(state.image.id, state.editing);
  $("correction").hidden = false;
  $("undo").disabled = true;
  setBrushValue(1);
  showMasks();
  $("view").focus();
  setStatus("correcting the mask: paint on the image");
}

function isEdited(card) {
  return state.editing !== null && state.editing.card === card;
}

function endCorrection() {
  if (!state.editing) return;
  words.end();
  state.editing.card.setEditing(false);
  state.editing = null;
  $("correction").hidden = true;
  viewer.setBrush(null);
  setStatus("");
  showMasks();
}

function setBrushValue(value) {
  $("brush-add").setAttribute("aria-pressed", String(value === 1));
  $("brush-erase").setAttribute("aria-pressed", String(value === 0));
  if (state.editing) viewer.setBrush({ mask: state.editing.mask, value, radius: radius() });
}

/** Radius of the brush in pixels of the image; the size of the brush is in thousandths of its longer side. */
function radius() {
  const side = state.image ? Math.max(state.image.width, state.image.height) : 1000;
  const pixels = Math.max(0.6, (Number($("brush-size").value) * side) / 500 / 2);
  $("brush-pixels").textContent = `${Math.max(1, Math.round(2 * pixels))} px`;
  return pixels;
}

function changeSize(step) {
  $("brush-size").value = Number($("brush-size").value) + step;
  if (viewer.brush) viewer.brush.radius = radius();
  viewer.draw();
}

function undo() {
  if (!state.editing) return;
  state.editing.mask.undo();
  showStrokes();
}

/** Draws the corrected mask after a stroke or its undo. */
function showStrokes() {
  $("undo").disabled = state.editing.mask.strokes.length === 0;
  words.changed();
  viewer.draw();
}

async function saveCorrection() {
  const { card, mask } = state.editing;
  await attempt(async () => {
    $("save").disabled = true;
    const isWritten = await words.settle().finally(() => { $("save").disabled = false; });
    if (!isWritten || !isEdited(card)) return;
    let answer = card.answer;
    if (mask.strokes.length) {
      answer = await getJson(path(card, "/mask"), { method: "PUT", body: await mask.toBlob() });
      card.mask = new Mask(mask.width, mask.height, mask.pixels);
    }
    const text = card.editor.value.trim();
    const changed = text === answer.answer || !text ? null : text;
    if (changed !== answer.corrected_answer) {
      answer = await getJson(path(card, ""), { method: "PATCH", json: { corrected_answer: changed } });
    }
    state.hasUnsaved = true;
    card.finish(answer);
    endCorrection();
    setStatus("the correction is saved");
    card.part(".correct").focus();
  });
}

async function restoreMask() {
  const { card } = state.editing;
  await attempt(async () => {
    let answer = await getJson(path(card, "/mask"), { method: "DELETE" });
    // words that were written from the corrected mask do not fit the model's
    if (card.written.has(answer.corrected_answer)) {
      answer = await getJson(path(card, ""), { method: "PATCH", json: { corrected_answer: null } });
    }
    card.mask = await Mask.read(await getBlob(path(card, "/mask")));
    card.finish(answer);
    endCorrection();
    setStatus("the model's mask is back");
  });
}

// Downloads

function download(address, name) {
  return attempt(async () => save(await getBlob(address), name));
}

async function downloadPairs(query, name) {
  await attempt(async () => {
    save(await getBlob(`api/images/${state.image.id}/pairs.zip${query}`), name);
    state.hasUnsaved = false;
  });
}

/** The masks of all slices, one segment for each question, or for the question of a card. */
function downloadVolume(name, card) {
  const query = card ? `?question=${encodeURIComponent(card.answer.question)}` : "";
  return download(`api/images/${state.image.id}/${name}${query}`, name);
}

// Keys and controls

function showCursor(x, y) {
  const isInside = x !== null && state.image && x >= 0 && y >= 0 && x < state.image.width && y < state.image.height;
  $("cursor").hidden = !isInside;
  if (isInside) $("cursor").textContent = `x ${Math.floor(x)}, y ${Math.floor(y)}`;
}

function toggleMasks() {
  viewer.visible = !viewer.visible;
  planes.setStyle(viewer);
  $("masks").setAttribute("aria-pressed", String(viewer.visible));
  viewer.draw();
}

function newest() {
  return [...state.cards].reverse().find((card) => card.mask);
}

const SINGLE_KEYS = {
  o: choose,
  q: () => $("question").focus(),
  m: toggleMasks,
  s: () => allSlices.toggle(),
  e: () => newest() && beginCorrection(newest()),
  a: () => setBrushValue(1),
  x: () => setBrushValue(0),
  "[": () => changeSize(-2),
  "]": () => changeSize(2),
  "+": () => viewer.zoomBy(1.25),
  "=": () => viewer.zoomBy(1.25),
  "-": () => viewer.zoomBy(1 / 1.25),
  "0": () => viewer.fit(),
  "?": () => $("help").showModal(),
  PageUp: () => volume.step(-1),
  PageDown: () => volume.step(1),
};

function key(event) {
  if (document.querySelector("dialog[open]")) return;
  const isTyping = event.target.matches("textarea, select, input:not([type=checkbox], [type=range])");
  if (event.key === "Escape") {
    if (state.asking) stop();
    else if (state.editing) endCorrection();
    return;
  }
  if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "z" && state.editing && !isTyping) {
    event.preventDefault();
    undo();
    return;
  }
  if (isTyping || event.ctrlKey || event.altKey || event.metaKey || !$("keys").checked) return;
  const digit = Number(event.key);
  const action = digit >= 1 ? () => toggleCard(digit - 1) : SINGLE_KEYS[event.key];
  if (action) {
    event.preventDefault();
    action();
  }
}

function toggleCard(number) {
  const card = state.cards.find((card) => card.number === number);
  if (card) {
    card.shown.checked = !card.shown.checked;
    showMasks();
  }
}

function connect() {
  const click = (id, action) => $(id).addEventListener("click", action);
  click("open", choose);
  click("choose", choose);
  click("try-sample", () => attempt(async () => upload([await getBlob("api/sample")])));
  $("file").addEventListener("change", () => {
    upload([...$("file").files]);
    $("file").value = "";
  });
  $("ask").addEventListener("submit", submit);
  $("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  });
  click("stop", stop);
  click("alert-close", clearError);
  click("masks", toggleMasks);
  click("zoom-in", () => viewer.zoomBy(1.25));
  click("zoom-out", () => viewer.zoomBy(1 / 1.25));
  click("zoom-fit", () => viewer.fit());
  $("opacity").addEventListener("input", () => {
    viewer.opacity = Number($("opacity").value) / 100;
    planes.setStyle(viewer);
    viewer.draw();
  });
  $("outline").addEventListener("change", () => {
    viewer.outline = $("outline").checked;
    planes.setStyle(viewer);
    viewer.draw();
  });
  click("brush-add", () => setBrushValue(1));
  click("brush-erase", () => setBrushValue(0));
  $("brush-size").addEventListener("input", () => changeSize(0));
  click("undo", undo);
  click("cancel", endCorrection);
  click("restore", restoreMask);
  click("save", saveCorrection);
  click("nifti", () => downloadVolume("mask.nii.gz"));
  click("seg", () => downloadVolume("mask.dcm"));
  click("pairs", () => downloadPairs("", "prsmed-pairs.zip"));
  click("close", () => {
    const { id } = state.image;
    closeImage();
    attempt(() => request(`api/images/${id}`, { method: "DELETE" }));
  });
  click("help-open", () => $("help").showModal());
  $("keys").checked = localStorage.getItem(KEYS_KEY) !== "off";
  $("keys").addEventListener("change", () => localStorage.setItem(KEYS_KEY, $("keys").checked ? "on" : "off"));
  document.addEventListener("keydown", key);
  const drop = $("drop");
  drop.addEventListener("dragover", (event) => {
    event.preventDefault();
    drop.classList.add("over");
  });
  drop.addEventListener("dragleave", () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    attempt(() => filesOf(event.dataTransfer)).then((files) => files && upload(files));
  });
  // a file that misses the area must not replace the page
  for (const name of ["dragover", "drop"]) window.addEventListener(name, (event) => event.preventDefault());
}

/** Offers questions of the training. */
function showExamples(questions) {
  for (const question of questions) {
    const chip = document.createElement("button");
    chip.type = "button";
    chip.textContent = question;
    chip.addEventListener("click", () => {
      $("question").value = question;
      $("question").focus();
    });
    $("examples").append(chip);
  }
  $("examples").hidden = questions.length === 0;
  if (questions.length) $("question").placeholder = questions[0];
}

let waitsForToken = null;

/** Asks for the token, once for all requests that wait for it. */
function tokenOf(reason) {
  waitsForToken ||= new Promise((resolve) => {
    $("token-reason").textContent = `${reason}. Enter the token that the server was started with.`;
    $("token-text").value = "";
    $("token").addEventListener("close", () => {
      waitsForToken = null;
      resolve($("token-text").value);
    }, { once: true });
    $("token").showModal();
  });
  return waitsForToken;
}

/** Opens the image of this tab again after the page was loaded again. */
async function reopen() {
  const id = sessionStorage.getItem(IMAGE_KEY);
  if (!id) return;
  try {
    await openImage(await getJson(`api/images/${id}`));
  } catch (error) {
    sessionStorage.removeItem(IMAGE_KEY);
    if (error.status !== 404) showError(error);
  }
}

connect();
onTokenNeeded(tokenOf);
attempt(async () => {
  state.model = await getJson("api/model");
  $("model").textContent = `${state.model.name} · ${state.model.classes.join(", ")}`;
  document.title = `${state.model.name} · prsmed`;
  $("question").maxLength = state.model.limits.question_characters;
  showExamples(state.model.questions);
  sequences.setNames(state.model.sequences);
  $("sample").hidden = !state.model.has_sample;
  await reopen();
});
