"use strict";
const $ = id => document.getElementById(id);
const SETTINGS = ["system", "temperature", "top_p", "max_tokens", "seed"];
const EXAMPLES = [
  "What is 2 plus 3?",
  "What is the opposite of small?",
  "Put these words in order: plum, apple, nut.",
  "Write a Python function that reverses a list.",
];
const EMPTY = {turns: [], settings: {}, models: null, plain: false};
let state = load();      // turns: [{prompt, messages, answers: [{model, text, score, problem}], chosen}]
let info = {models: [], scores: false, preferences: "", problem: "the server has not named its models yet"};
let isKept = true;       // the browser took the last state
let running = null;      // an AbortController while answers stream
let edited = null;       // the turn whose message is in the box
let draft = "";          // what was there before

function load() {
  try {
    const loaded = {...structuredClone(EMPTY), ...JSON.parse(localStorage.getItem("dschat") || "{}")};
    let before = [];
    for (const turn of loaded.turns) before = turn.messages = [...before.slice(0, turn.numShared || 0), ...turn.messages];
    return loaded;
  } catch { return structuredClone(EMPTY); }
}
// Most of a turn's messages are those of the turn before it: only the others are stored.
function stored() {
  let before = [];
  const turns = state.turns.map(turn => {
    const isShared = (message, i) => message.role === before[i]?.role && message.content === before[i].content;
    const differs = turn.messages.findIndex((message, i) => !isShared(message, i));
    const numShared = differs < 0 ? turn.messages.length : differs;
    before = turn.messages;
    return {...turn, numShared, messages: turn.messages.slice(numShared)};
  });
  return {...state, turns};
}
function save() {
  try {
    localStorage.setItem("dschat", JSON.stringify(stored()));
    isKept = true;
  } catch {
    if (isKept) say("this browser keeps no conversation");  // once: Undo is in that line too
    isKept = false;
  }
}
function say(text, undo) {
  $("status").textContent = text;
  if (undo) $("status").append(" ", button("Undo", "", undo));
}
function element(tag, name, text) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
}
function button(text, label, onclick) {
  const made = element("button", "", text);
  made.type = "button";
  if (label) made.setAttribute("aria-label", label);
  made.onclick = onclick;
  return made;
}

// -- the conversation

const isGood = answer => answer.text && !answer.problem && !answer.writing;
const continued = turn => turn.chosen !== undefined ? turn.answers[turn.chosen] : turn.answers.find(isGood);

// The conversation as the model sees it: of each turn the chosen answer. Turns without one are left out.
function messagesBefore(count) {
  const system = $("system").value.trim();
  const messages = system ? [{role: "system", content: system}] : [];
  for (const turn of state.turns.slice(0, count)) {
    const answer = continued(turn);
    if (answer) messages.push({role: "user", content: turn.prompt}, {role: "assistant", content: answer.text});
  }
  return messages;
}

// Continue with other turns; `what` happened, and the status line can undo it.
function replaceTurns(turns, what) {
  const before = state.turns;
  stopEditing();
  state.turns = turns;
  draw();
  save();
  say(what, before.length && (() => { stop(); replaceTurns(before, ""); say("as before"); }));
  $("prompt").focus();
}

function stop() { if (running) running.abort(); }
function isIdle() {
  if (running) say("stop the answer first (Escape)");
  return !running;
}

const ticked = () => info.models.filter(name => state.models.includes(name));
function canAsk() {
  if (!isIdle()) return false;
  if (!ticked().length) say(info.problem || "tick a model first");
  return ticked().length > 0;
}

// Later turns followed from this one as it was, so they go.
function askAgain(turn, prompt) {
  const number = state.turns.indexOf(turn), numLater = state.turns.length - number - 1;
  replaceTurns(state.turns.slice(0, number), "asked again" + (numLater ? `; later turns removed: ${numLater}` : ""));
  send(prompt);
}

function remove(turn) {
  replaceTurns(state.turns.filter(other => other !== turn), "turn deleted");
}

function edit(turn) {
  stopEditing();
  [edited, draft] = [turn, $("prompt").value];
  fillBox(turn.prompt);
  for (const other of state.turns.slice(state.turns.indexOf(turn))) sectionOf(other).classList.add("replaced");
  show();
  say("sending it replaces this turn and those after it");
  $("prompt").focus();
}

function stopEditing() {
  if (!edited) return;
  for (const section of document.querySelectorAll(".replaced")) section.classList.remove("replaced");
  edited = null;
  fillBox(draft);
  show();
  say("");
}

function fillBox(text) {
  $("prompt").value = text;
  fitBox();
}
function fitBox() { $("prompt").rows = Math.min(8, $("prompt").value.split("\n").length); }

// -- drawing

function drawAnswer(turn, index) {
  const answer = turn.answers[index], isChosen = turn.chosen === index;
  const card = element("article", "answer" + (isChosen ? " chosen" : ""));
  card.setAttribute("aria-label", "Answer of " + answer.model);
  const meta = element("div", "meta");
  meta.append(element("span", "name", answer.model), element("span", "score"));
  const text = element("div", "text" + (answer.writing ? " writing" : ""));
  card.append(meta, text);
  if (answer.problem) card.append(element("div", "problem", answer.problem));
  const actions = element("div", "meta");
  actions.append(button("Copy", "Copy the answer of " + answer.model, () => copyText(answer.text)));
  if (turn.answers.length > 1) {
    const name = "Prefer the answer of " + answer.model;
    const prefer = button(isChosen ? "Preferred" : "Prefer", name, () => choose(turn, index));
    prefer.setAttribute("aria-pressed", String(isChosen));
    prefer.disabled = turn.chosen !== undefined || !turn.answers.every(isGood);
    prefer.classList.add("prefer");
    actions.append(prefer);
  }
  card.append(actions);
  drawText(answer, card);
  drawScore(answer, card);
  return card;
}

function drawTurn(turn) {
  const section = element("section", "turn");
  section.setAttribute("aria-busy", String(turn.answers.some(answer => answer.writing)));
  const asked = element("div", "user text", turn.prompt), tools = element("div", "meta tools");
  asked.dir = "auto";
  tools.append(
    button("Edit", "Edit this message", () => isIdle() && edit(turn)),
    button("Retry", "Answer this message again", () => canAsk() && askAgain(turn, turn.prompt)),
    button("Delete", "Delete this turn", () => isIdle() && remove(turn)),
  );
  const answers = element("div", "answers");
  answers.append(...turn.answers.map((_, index) => drawAnswer(turn, index)));
  section.append(asked, tools, answers);
  if (!continued(turn) && !turn.answers.some(answer => answer.writing))
    section.append(element("div", "note", "Without an answer: this turn is not sent with the next message."));
  return section;
}

function draw() {
  const start = element("div", "hint");
  const more = info.models.length > 1 ? " Tick several models to compare their answers side by side." : "";
  start.append(element("p", "", "Say something, or try one of these." + more));
  start.append(...EXAMPLES.map(text => button(text, "", () => canAsk() && send(text))));
  $("turns").replaceChildren(...(state.turns.length ? state.turns.map(drawTurn) : [start]));
}

const sectionOf = turn => $("turns").children[state.turns.indexOf(turn)];
const cardOf = (turn, answer) => sectionOf(turn).querySelectorAll(".answer")[turn.answers.indexOf(answer)];

// Draws one turn again, alone: a screen reader reads what changes. The focus stays on its button.
function redraw(turn) {
  const section = sectionOf(turn);
  if (!section) return;
  const follows = isAtEnd(), index = [...section.querySelectorAll("button")].indexOf(document.activeElement);
  section.replaceWith(drawTurn(turn));
  if (index >= 0) sectionOf(turn).querySelectorAll("button")[index].focus();
  if (follows) toEnd();
}

function toEnd() { document.querySelector("main").scrollTop = 1e9; }
function isAtEnd() {
  const main = document.querySelector("main");
  return main.scrollHeight - main.scrollTop - main.clientHeight < 60;
}

function drawText(answer, card) {
  const place = card.querySelector(".text");
  if (state.plain) {
    place.classList.add("plain");
    place.dir = "auto";
    place.textContent = answer.text;
  } else place.replaceChildren(rendered(answer.text));
}

function drawScore(answer, card) {
  if (answer.score !== undefined) card.querySelector(".score").textContent = "reward " + answer.score.toFixed(3);
}

async function copyText(text) {
  try { await navigator.clipboard.writeText(text); say("copied"); }
  catch { say("the browser does not allow copying here"); }
}

// -- asking

// Each piece draws the answer again. Long answers take longer, so they are drawn less often.
async function stream(turn, answer, signal) {
  const body = {model: answer.model, messages: turn.messages, stream: true};
  for (const name of ["temperature", "top_p", "max_tokens", "seed"])
    if ($(name).value !== "") body[name] = Number($(name).value);
  let timer = null, wait_ms = 20;
  function update() {
    timer = null;
    if (!state.turns.includes(turn)) return;
    const began = performance.now(), follows = isAtEnd();
    drawText(answer, cardOf(turn, answer));
    if (follows) toEnd();
    save();
    wait_ms = Math.max(20, 4 * (performance.now() - began));
  }
  try {
    for await (const event of events(await ask("/v1/chat/completions", body, signal))) {
      if (event.error) throw new Error(event.error.message);
      answer.text += event.choices[0].delta.content || "";
      timer ??= setTimeout(update, wait_ms);
    }
  } catch (error) {
    if (error.name !== "AbortError") answer.problem = error.message;
  }
  clearTimeout(timer);
  delete answer.writing;
}

async function send(prompt) {
  const messages = [...messagesBefore(state.turns.length), {role: "user", content: prompt}];
  const turn = {prompt, messages, answers: ticked().map(model => ({model, text: "", writing: true}))};
  const stopper = running = new AbortController();
  if (state.turns.length) $("turns").append(drawTurn(turn)); else $("turns").replaceChildren(drawTurn(turn));
  state.turns = [...state.turns, turn];
  toEnd();
  save();
  show();
  $("prompt").focus();
  await Promise.all(turn.answers.map(answer => stream(turn, answer, stopper.signal)));
  if (running === stopper) running = null;
  show();
  redraw(turn);
  save();
  if (info.scores) await score(turn);
}

async function score(turn) {
  const answers = turn.answers.filter(isGood);
  if (!answers.length || !state.turns.includes(turn)) return;
  try {
    const texts = answers.map(answer => answer.text);
    const {scores} = await (await ask("/api/score", {messages: turn.messages, answers: texts})).json();
    scores.forEach((value, i) => { answers[i].score = value; });
  } catch (error) { say("no scores: " + error.message); }
  if (!state.turns.includes(turn)) return;
  for (const answer of answers) drawScore(answer, cardOf(turn, answer));
  save();
}

// -- preferences

// Better than each of the others: as many pairs.
async function choose(turn, index) {
  const chosen = turn.answers[index];
  turn.chosen = index;
  const rows = turn.answers.filter(other => other.text !== chosen.text).map(other => ({
    messages: turn.messages, chosen: chosen.text, rejected: other.text,
    chosen_model: chosen.model, rejected_model: other.model,
  }));
  redraw(turn);
  try {
    for (const row of rows) await ask("/api/preference", row);
    const what = rows.length ? "recorded in " + info.preferences : "not recorded, as the answers are alike";
    say(`${what}; the conversation continues with the answer of ${continued(turn).model}`);
  } catch (error) {
    delete turn.chosen;
    redraw(turn);
    say("not recorded: " + error.message);
  }
  save();
  $("prompt").focus();
}

// -- the page around it

function show() {
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  $("cancel").hidden = edited === null;
}

function drawModels() {
  const boxes = info.models.map(name => {
    const label = element("label"), box = element("input");
    box.type = "checkbox";
    box.value = name;
    box.checked = state.models.includes(name);
    box.onchange = () => {
      state.models = info.models.filter(other => other === name ? box.checked : state.models.includes(other));
      save();
    };
    label.append(box, document.createTextNode(name));
    return label;
  });
  $("models").replaceChildren($("models").firstElementChild, ...boxes);
}

async function start() {
  draw();
  toEnd();
  try { info = await (await ask("/api/info")).json(); }
  catch (error) { info.problem = error.message; say(error.message); return; }
  const known = (state.models || []).filter(name => info.models.includes(name));
  state.models = known.length ? known : info.models.slice();
  say("");
  drawModels();
  if (!state.turns.length) draw();
}

for (const name of SETTINGS) {
  if (state.settings[name] !== undefined) $(name).value = state.settings[name];
  $(name).onchange = () => { state.settings[name] = $(name).value; save(); };
}
$("plain").checked = state.plain;
$("plain").onchange = () => { state.plain = $("plain").checked; draw(); save(); };
for (const turn of state.turns) for (const answer of turn.answers) delete answer.writing;  // the page was left

$("form").onsubmit = event => {
  event.preventDefault();
  const prompt = $("prompt").value.trim(), turn = edited;
  if (!prompt || !canAsk()) return;
  stopEditing();
  if (!turn) fillBox("");
  say("");
  if (turn) askAgain(turn, prompt); else send(prompt);
};
$("prompt").onkeydown = event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("form").requestSubmit(); }
};
$("prompt").oninput = fitBox;
document.onkeydown = event => {
  if (event.key !== "Escape") return;
  if (running) stop(); else stopEditing();
};
$("stop").onclick = stop;
$("cancel").onclick = () => { stopEditing(); $("prompt").focus(); };
$("new").onclick = () => {
  stop();
  replaceTurns([], "conversation deleted");
};
$("key").onchange = start;
addEventListener("pagehide", () => { if (running) save(); });  // else the conversation of a newer tab stays
start();
