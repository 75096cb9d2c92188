// The chat page: the conversation that is shown, the composer below it, and what its buttons do.
import { fileList, read } from "./attach.js";
import { $, tell } from "./dom.js";
import { startHistory } from "./history.js";
import { chosen, loadModels, models, watchHealth } from "./models.js";
import { applyTheme, editSettings, sampling, settings } from "./settings.js";
import { anyUnsaved, saveChanged } from "./store.js";
import { answer } from "./stream.js";
import { add, choose, content, dropIfEmpty, messages, newConversation, newTurn, shown, siblings } from "./tree.js";
import { TurnView } from "./turn.js";

const scroller = document.querySelector("main");
const views = new WeakMap(); // by turn
const deleted = new WeakSet(); // conversations that must not be kept again
// running: {turn, controller} of the answer that is being written. editing: turn with its question in the composer.
let conversation = newConversation(), running = null, editing = null, files = [], follow = true;

// --- The conversation

function view(turn) {
  if (!views.has(turn)) {
    views.set(turn, new TurnView(turn, { retry, edit, choose: chooseBranch }, toEnd));
    views.get(turn).paint();
  }
  return views.get(turn);
}

function show() {
  const turns = shown(conversation), log = $("log");
  for (const turn of turns) view(turn).showBranches(siblings(conversation, turn));
  const roots = turns.map((turn) => view(turn).root);
  let same = 0; // what stays is not touched: it may hold a selection, and is not read out again
  while (same < roots.length && log.children[same] === roots[same]) same++;
  while (log.children.length > same) log.lastChild.remove();
  log.append(...roots.slice(same));
  showComposer();
  toEnd();
}

// Shows the newest line, unless someone has scrolled up.
function toEnd() {
  if (follow && conversation.turns.length) scroller.scrollTop = scroller.scrollHeight;
}

async function keep(one) {
  if (deleted.has(one) || !one.turns.length) return;
  try {
    await saveChanged(one);
  } catch (reason) {
    const why = reason.name === "QuotaExceededError" ? "its store is full" : reason.message;
    tell(`This browser cannot keep “${one.title}” (${why}). It is still here until this tab closes: `
      + "export it under History, or delete others there.");
  }
}

async function ask(question, attached, parent) {
  stop();
  const one = conversation, turn = newTurn(parent, question, attached), controller = new AbortController();
  const system = settings().system?.trim();
  add(one, turn);
  const before = shown(one).slice(0, -1);
  const sent = [...(system ? [{ role: "system", content: system }] : []), ...before.flatMap(messages),
    { role: "user", content: content(turn) }];
  running = { turn, controller };
  follow = true;
  view(turn).busy = true;
  view(turn).paint();
  show();
  keep(one);
  try {
    if (!chosen) await loadModels();
    const body = { model: chosen.id, messages: sent, ...sampling() };
    await answer(turn, body, controller.signal, () => view(turn).repaint());
  } catch (reason) { // no models
    turn.error = reason instanceof TypeError ? "The server does not answer, or the connection broke." : reason.message;
  }
  if (running?.turn === turn) running = null;
  showComposer();
  await keep(one); // first, so that nobody who sees it done loses it by closing the tab
  view(turn).busy = false;
  view(turn).paint();
}

function stop() {
  running?.controller.abort();
  running = null;
}

function retry(turn) {
  if (running?.turn === turn) stop();
  dropIfEmpty(conversation, turn);
  ask(turn.question, turn.files, turn.parent);
}

function chooseBranch(turn) {
  leaveEdit();
  choose(conversation, turn);
  follow = false;
  show();
  view(turn).root.scrollIntoView({ block: "nearest" });
  view(turn).branches.querySelector(":enabled").focus();
  keep(conversation);
}

function open(other) {
  if (other !== conversation) stop();
  conversation = other;
  follow = true;
  leaveEdit();
  show();
}

// --- The composer

function showComposer() {
  $("welcome").hidden = conversation.turns.length > 0;
  $("stop").hidden = !running;
  $("send").hidden = Boolean(running);
  $("send").disabled = !$("prompt").value.trim() && !files.length;
  $("editing").hidden = !editing;
  $("files").hidden = !files.length;
  if (!CSS.supports("field-sizing", "content")) {
    $("prompt").style.height = "auto";
    $("prompt").style.height = `${$("prompt").scrollHeight}px`;
  }
}

function setFiles(attached) {
  files = attached;
  $("files").replaceChildren(...fileList(files, (file) => setFiles(files.filter((other) => other !== file))));
  showComposer();
}

function fill(turn, question, attached) {
  editing = turn;
  $("prompt").value = question;
  $("prompt").focus();
  setFiles(attached);
}

const edit = (turn) => fill(turn, turn.question, turn.files);
const leaveEdit = () => fill(null, "", []);

async function attach(chosenFiles) {
  try {
    setFiles([...files, ...await read([...chosenFiles], files)]);
  } catch (reason) {
    tell(reason.message);
  }
}

$("composer").onsubmit = (event) => {
  event.preventDefault();
  const question = $("prompt").value.trim(), attached = files;
  if ((!question && !attached.length) || running) return;
  const parent = editing ? editing.parent : conversation.leaf;
  leaveEdit();
  ask(question, attached, parent);
};
$("prompt").oninput = showComposer;
$("prompt").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
};
$("stop").onclick = () => {
  running?.controller.abort();
  $("prompt").focus();
};
$("cancel-edit").onclick = leaveEdit;
$("new").onclick = () => open(newConversation());
$("ideas").onclick = (event) => {
  if (event.target.type === "button") ask(event.target.textContent, [], null);
};
$("attach").onclick = () => $("pick").click();
$("pick").onchange = async () => {
  await attach($("pick").files);
  $("pick").value = ""; // the same file may be chosen again
};

// --- The window

scroller.onscroll = () => {
  follow = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 40;
};
new ResizeObserver(toEnd).observe(scroller);
document.onkeydown = (event) => {
  if (event.key === "Escape" && running && !document.querySelector("dialog[open]")) running.controller.abort();
};
document.ondragover = (event) => event.preventDefault();
document.ondrop = (event) => {
  event.preventDefault();
  attach(event.dataTransfer.files);
};
window.onbeforeunload = (event) => {
  if (anyUnsaved()) event.preventDefault();
};
document.onvisibilitychange = () => {
  if (document.hidden && running) keep(conversation);
};
$("chip").onclick = $("open-settings").onclick = () => editSettings(models, chosen, () => loadModels().catch(() => {}));

startHistory({
  open,
  current: () => conversation,
  removed: (id) => {
    if (conversation.id !== id) return;
    deleted.add(conversation);
    open(newConversation());
  },
});
applyTheme();
showComposer(); // something may have been typed while this was loading
$("greeting").textContent = "Ask a question";
watchHealth();
