// The chat page's behaviour: settings, the conversation, streams of answers, and their Markdown as plain elements.
const $ = (id) => document.getElementById(id);
const base = new URL(location.pathname.replace(/\/?$/, "/"), location.origin);
const KEY = "graphllm.key", SETTINGS = "graphllm.settings";
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const scroller = document.querySelector("main");
const turns = [];
let models = [], chosen = null, version = null, running = null, editing = null, follow = true;

function el(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

// --- Markdown: the safe and common part of it. Repetition is bounded, so that no text takes long.

const INLINE = new RegExp([
  /`([^`\n]{1,1000})`/,
  /\*\*([^*\s](?:[^*\n]|\*(?!\*)){0,1000}?)\*\*/,
  /(?<![*\w])\*([^*\s](?:[^*\n]{0,1000}?[^*\s])?)\*(?![*\w])/,
  /!?\[([^[\]\n]{1,300})\]\(((?:https?:\/\/|mailto:)(?:[^\s()]|\([^\s()]{0,200}\)){1,1000})\)/,
  /(https?:\/\/[^\s<>"'`()[\]*]{0,1000}[^\s<>"'`()[\]*.,;:!?])/,
].map((part) => part.source).join("|"), "g");
const FENCE = /^ {0,3}(`{3,}|~{3,}) *([\w+#.-]*)[^`]*$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const HEADING = /^ {0,3}(#{1,6}) +(.*)$/;
const QUOTE = /^ {0,3}> ?/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const DEEPEST = 8;

function link(target, text) {
  return el("a", { href: target, textContent: text, target: "_blank", rel: "noopener noreferrer" });
}

function inline(text) {
  const out = [];
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    const [whole, code, bold, italic, label, target, bare] = match;
    out.push(text.slice(at, match.index));
    at = match.index + whole.length;
    if (code) out.push(el("code", { textContent: code }));
    else if (bold) out.push(el("strong", {}, ...inline(bold)));
    else if (italic) out.push(el("em", {}, ...inline(italic)));
    else out.push(link(target ?? bare, label ?? bare));
  }
  return [...out, text.slice(at)];
}

function codeBlock(title, text) {
  const button = quiet("Copy", () => copy(text, button));
  const pre = el("pre", { tabIndex: 0, ariaLabel: title || "Code" }, el("code", { textContent: text }));
  return el("div", { className: "code" }, el("div", {}, el("span", { textContent: title }), button), pre);
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => inline(cell.trim()));
  const row = (tag) => (line) => el("tr", {}, ...cells(line).map((cell) => el(tag, {}, ...cell)));
  const body = el("tbody", {}, ...lines.slice(2).map(row("td")));
  return el("div", { className: "scroll" }, el("table", {}, el("thead", {}, row("th")(lines[0])), body));
}

function list(lines, depth) {
  const [, indent, marker] = ITEM.exec(lines[0]);
  const items = [];
  let width = 0;
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length === indent.length) {
      width = item[0].length;
      items.push([line.slice(width)]);
    } else items.at(-1).push(line.slice(Math.min(width, line.search(/\S|$/))));
  }
  const nodes = items.map((item) => el("li", {}, ...markdown(item.join("\n"), depth + 1)));
  return /\d/.test(marker) ? el("ol", { start: parseInt(marker) }, ...nodes) : el("ul", {}, ...nodes);
}

// The text cut into blocks. source tells whether a block is still the one that was drawn; draw() makes its element.
function blocks(text, depth = 0) {
  const lines = text.split("\n"), found = [];
  let i = 0;
  const take = (more) => {
    const from = i++;
    while (i < lines.length && more(lines[i])) i++;
    return lines.slice(from, i);
  };
  const tableAt = (n) => lines[n].includes("|") && /^[\s|:-]+$/.test(lines[n + 1] ?? "") && /-/.test(lines[n + 1]);
  const starts = (n) => [FENCE, ITEM, HEADING, QUOTE, RULE].some((start) => start.test(lines[n])) || tableAt(n);
  while (i < lines.length) {
    const from = i, line = lines[i], fence = FENCE.exec(line), heading = HEADING.exec(line), item = ITEM.exec(line);
    let draw;
    if (!line.trim()) {
      i++;
      continue;
    } else if (fence) {
      const closes = (l) => l.trim().startsWith(fence[1]) && !l.trim().replaceAll(fence[1][0], "");
      const [, ...inside] = take((l) => !closes(l));
      i++; // the closing fence
      draw = () => codeBlock(fence[2], inside.join("\n"));
    } else if (heading) {
      i++;
      draw = () => el(`h${Math.min(heading[1].length + 2, 5)}`, { dir: "auto" }, ...inline(heading[2]));
    } else if (RULE.test(line)) {
      i++;
      draw = () => el("hr");
    } else if (QUOTE.test(line) && depth < DEEPEST) {
      const inside = take((l) => QUOTE.test(l)).map((l) => l.replace(QUOTE, ""));
      draw = () => el("blockquote", {}, ...markdown(inside.join("\n"), depth + 1));
    } else if (item && depth < DEEPEST) {
      const ordered = /\d/.test(item[2]);
      const goesOn = () => {
        let n = i;
        while (n < lines.length && !lines[n].trim()) n++;
        if (n < lines.length && lines[n].search(/\S/) > item[1].length) return true;
        const other = ITEM.exec(lines[n] ?? "");
        return other !== null && other[1].length === item[1].length && /\d/.test(other[2]) === ordered;
      };
      const taken = take(goesOn);
      draw = () => list(taken, depth);
    } else if (tableAt(i)) {
      const taken = take((l) => l.includes("|"));
      draw = () => el("div", {}, table(taken));
    } else {
      const taken = take((l) => l.trim() && !starts(i));
      draw = () => el("p", { dir: "auto" }, ...inline(taken.join("\n")));
    }
    found.push({ source: lines.slice(from, i).join("\n"), draw });
  }
  return found;
}

function markdown(text, depth) {
  return blocks(text, depth).map((block) => block.draw());
}

const drawn = new WeakMap();

// Draws text that grew: what is there already stays, so that a selection in it does too.
function update(box, text) {
  const fresh = blocks(text);
  let same = 0;
  while (same < fresh.length && box.children[same] && drawn.get(box.children[same]) === fresh[same].source) same++;
  while (box.children.length > same) box.lastChild.remove();
  for (const block of fresh.slice(same)) {
    const node = block.draw();
    drawn.set(node, block.source);
    box.append(node);
  }
}

// --- The server

// fetch with the API key; asks for one as long as the server refuses. onSend: called before each try.
async function request(path, options = {}, onSend = () => {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
    onSend();
    const response = await fetch(new URL(path, base), { ...options, headers });
    if (response.status !== 401) return response;
    if (sessionStorage.getItem(KEY) === key && !(await askKey(key !== null))) return response;
  }
}

let asking = null;

function askKey(refused) {
  asking ??= new Promise((resolve) => {
    const dialog = $("key-dialog"), form = dialog.querySelector("form");
    $("key-refused").hidden = !refused;
    form.reset();
    form.onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, form.elements.key.value.trim());
      dialog.close("given");
    };
    $("cancel-key").onclick = () => dialog.close("");
    dialog.returnValue = "";
    dialog.onclose = () => {
      asking = null;
      resolve(dialog.returnValue === "given");
    };
    dialog.showModal();
  });
  return asking;
}

async function explain(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `${response.status} ${response.statusText} ${text}`.trim().slice(0, 500);
  }
}

async function* serverEvents(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", data = [];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
      else if (!line && data.length) {
        yield data.join("\n");
        data = [];
      }
    }
  }
}

async function loadModels() {
  const response = await request("v1/models");
  if (!response.ok) throw new Error(await explain(response));
  models = (await response.json()).data;
  chosen = models.find((model) => model.id === settings().model) ?? models[0];
  version = await request("version").then((r) => r.json()).then((v) => v.version, () => null);
  showModel();
}

function showModel() {
  document.title = `${chosen.id} · graphllm`;
  $("chip-name").textContent = chosen.id;
  $("greeting").textContent = `Ask ${chosen.id}`;
  const context = chosen.max_model_len && `${count(chosen.max_model_len)} tokens`;
  const facts = [["Model", chosen.id], ["Context", context], ["Loaded from", chosen.root], ["Owner", chosen.owned_by],
    ["Server", version && `graphllm ${version}`]].filter(([, value]) => value);
  for (const card of document.querySelectorAll(".card")) {
    card.hidden = false;
    card.replaceChildren(...facts.flatMap(([name, value]) => [el("dt", { textContent: name }), el("dd", {}, value)]));
  }
}

async function checkHealth() {
  let level = "away", cause = "The server does not answer.";
  try {
    const signal = AbortSignal.timeout(5000);
    const response = await fetch(new URL("health/ready", base), { cache: "no-store", signal });
    const body = await response.json().catch(() => null);
    level = response.ok ? "ready" : "waiting";
    cause = response.ok ? "" : `Not ready: ${body?.cause || body?.status || response.status}`;
  } catch { /* away */ }
  document.body.dataset.health = level;
  $("chip-health").textContent = cause || "Ready";
  if ($("cause").textContent !== cause) $("cause").textContent = cause;
  $("cause").hidden = !cause;
  return level;
}

async function watchHealth() {
  let asked = false; // once: a key that was refused must not be asked for again and again
  for (;;) {
    const level = document.hidden ? "hidden" : await checkHealth();
    if (level === "ready" && !chosen && !asked) {
      asked = true;
      loadModels().catch(() => {});
    }
    await new Promise((resolve) => setTimeout(resolve, level === "ready" ? 5000 : 1000));
  }
}

// --- Turns of the conversation

const count = (n) => n.toLocaleString("en");
const span = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);

function quiet(text, onclick) {
  return el("button", { type: "button", className: `quiet ${text.toLowerCase()}`, textContent: text, onclick });
}

class Turn {
  text = ""; reasoning = ""; calls = []; pieces = 0; usage = null; ending = null; error = null; busy = true;
  sent = 0; first = 0; last = 0; thought = 0; frame = 0;

  constructor(question) {
    this.question = question;
    this.waiting = el("span", { className: "waiting" });
    this.thinking = el("details", { className: "thinking", hidden: true, open: true }, el("summary"), el("div"));
    this.prose = el("div", { className: "prose" });
    this.callBox = el("div");
    this.alert = el("div", { className: "error", role: "alert", hidden: true }, el("span"),
      el("button", { type: "button", className: "retry", textContent: "Retry", onclick: () => retry(this) }));
    this.figures = el("div", { className: "figures", ariaLive: "off" });
    const copying = quiet("Copy", () => copy(this.text, copying));
    this.tools = el("div", { className: "tools" }, copying, quiet("Retry", () => retry(this)));
    this.answer = el("article", { className: "answer", ariaLabel: "Answer" },
      this.thinking, this.prose, this.callBox, this.waiting, this.alert, this.figures, this.tools);
    const copyAsked = quiet("Copy", () => copy(question, copyAsked));
    this.root = el("section", { className: "turn" },
      el("article", { className: "asked", ariaLabel: "You" }, el("p", { dir: "auto", textContent: question }),
        el("div", { className: "tools" }, copyAsked, quiet("Edit", () => edit(this)))),
      this.answer);
    this.paint();
  }

  // What later turns are told of this one: nothing when it came to nothing. A call cut short is no JSON.
  messages() {
    const called = this.ending === "tool_calls" && this.calls.length;
    if (!this.text && !called) return [];
    const calls = this.calls.map(({ id, name, json }) => (
      { id, type: "function", function: { name, arguments: json } }));
    return [{ role: "user", content: this.question },
      { role: "assistant", content: this.text, ...(called && { tool_calls: calls }) }];
  }

  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const { content, reasoning_content, reasoning, tool_calls } = choice.delta;
    const thoughts = reasoning_content ?? reasoning;
    if (content || thoughts || tool_calls) {
      this.last = performance.now();
      this.first ||= this.last;
      this.pieces++;
    }
    if (thoughts) this.reasoning += thoughts;
    if (content) this.text += content;
    for (const { index, id, function: { name, arguments: json } = {} } of tool_calls ?? []) {
      const call = (this.calls[index] ??= { id, name: "", json: "" });
      call.name += name ?? "";
      call.json += json ?? "";
    }
    if (this.reasoning && !this.thought && (content || tool_calls || choice.finish_reason)) {
      this.thought = performance.now();
      this.thinking.open = false;
    }
    this.ending = choice.finish_reason ?? this.ending;
  }

  async run(messages, signal) {
    try {
      if (!chosen) await loadModels();
      const options = { stream: true, stream_options: { include_usage: true } };
      const body = JSON.stringify({ model: chosen.id, messages, ...options, ...sampling() });
      const headers = { "Content-Type": "application/json" };
      const response = await request("v1/chat/completions", { method: "POST", headers, body, signal },
        () => { this.sent = performance.now(); });
      if (!response.ok) throw new Error(await explain(response));
      for await (const data of serverEvents(response.body)) {
        if (data === "[DONE]") break;
        this.take(JSON.parse(data));
        this.frame ||= requestAnimationFrame(() => this.paint());
      }
      if (!this.ending) throw new Error("The connection ended before the answer did.");
    } catch (reason) {
      if (signal.aborted) this.ending = "stopped";
      else if (reason instanceof TypeError) this.error = "The server does not answer, or the connection broke.";
      else this.error = reason.message;
    }
    this.busy = false;
    this.paint();
  }

  tellFigures() {
    const { usage, first, last, sent, ending } = this;
    const made = usage?.completion_tokens ?? this.pieces, about = usage ? "" : "≈ ";
    const cached = usage?.prompt_tokens_details?.cached_tokens;
    const rate = made > 1 && last > first ? ((made - 1) * 1000) / (last - first) : null;
    return [
      rate && `${about}${rate < 100 ? rate.toFixed(1) : count(Math.round(rate))} tokens/s`,
      first && `first token ${span(first - sent)}`,
      usage && `${count(usage.prompt_tokens)} in${cached ? ` (${count(cached)} cached)` : ""}`,
      made && `${about}${count(made)} out`,
      ending === "stopped" && "stopped",
      ending === "length" && "cut at the token limit",
    ].filter(Boolean).join(" · ");
  }

  paint() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.answer.classList.toggle("busy", this.busy);
    this.answer.ariaBusy = String(this.busy);
    this.thinking.hidden = !this.reasoning;
    const [summary, thoughts] = this.thinking.children;
    summary.textContent = this.thought ? `Thought for ${span(this.thought - this.first)}`
      : this.busy ? "Thinking" : "Thoughts";
    if (thoughts.textContent !== this.reasoning) thoughts.textContent = this.reasoning;
    update(this.prose, this.text);
    const calls = this.calls.filter(Boolean);
    this.callBox.replaceChildren(...calls.map((call) => codeBlock(`Tool call: ${call.name}`, pretty(call.json))));
    this.waiting.hidden = !this.busy || Boolean(this.text || this.calls.length);
    this.alert.hidden = !this.error;
    this.alert.firstChild.textContent = this.error ?? "";
    this.figures.textContent = this.tellFigures();
    this.tools.hidden = this.busy || Boolean(this.error && !this.text);
    this.tools.firstChild.hidden = !this.text;
    toEnd();
  }
}

// Shows the newest line, unless someone has scrolled up.
function toEnd() {
  if (follow && turns.length) scroller.scrollTop = scroller.scrollHeight;
}

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // still coming
  }
}

// Everything from turn i on goes.
function cut(i) {
  running?.abort();
  running = null;
  for (const turn of turns.splice(i)) turn.root.remove();
  if (!turns.includes(editing)) editing = null;
}

async function ask(question) {
  const system = settings().system?.trim();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...turns.flatMap((t) => t.messages()),
    { role: "user", content: question }];
  const turn = new Turn(question), controller = new AbortController();
  turns.push(turn);
  $("log").append(turn.root);
  follow = true;
  running = controller;
  showComposer();
  turn.paint();
  await turn.run(messages, controller.signal);
  if (running === controller) running = null;
  showComposer();
}

function retry(turn) {
  cut(turns.indexOf(turn));
  ask(turn.question);
}

function edit(turn) {
  editing = turn;
  $("prompt").value = turn.question;
  $("prompt").focus();
  showComposer();
}

async function copy(text, button) {
  if (navigator.clipboard) await navigator.clipboard.writeText(text);
  else { // not https and not localhost
    const area = el("textarea", { value: text });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

// --- Composer and settings

function showComposer() {
  $("welcome").hidden = turns.length > 0;
  $("stop").hidden = !running;
  $("send").hidden = Boolean(running);
  $("send").disabled = !$("prompt").value.trim();
  $("editing").hidden = !editing;
  if (!CSS.supports("field-sizing", "content")) {
    $("prompt").style.height = "auto";
    $("prompt").style.height = `${$("prompt").scrollHeight}px`;
  }
}

function leaveEdit() {
  editing = null;
  $("prompt").value = "";
  $("prompt").focus();
  showComposer();
}

$("composer").onsubmit = (event) => {
  event.preventDefault();
  const question = $("prompt").value.trim();
  if (!question || running) return;
  if (editing) cut(turns.indexOf(editing));
  leaveEdit();
  ask(question);
};
$("prompt").oninput = showComposer;
$("prompt").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
};
$("stop").onclick = () => {
  running?.abort();
  $("prompt").focus();
};
$("cancel-edit").onclick = leaveEdit;
$("new").onclick = () => {
  cut(0);
  leaveEdit();
};
$("ideas").onclick = (event) => {
  if (event.target.type === "button") ask(event.target.textContent);
};
scroller.onscroll = () => {
  follow = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 40;
};
new ResizeObserver(toEnd).observe(scroller);
document.onkeydown = (event) => {
  if (event.key === "Escape" && running && !document.querySelector("dialog[open]")) running.abort();
};

function settings() {
  return JSON.parse(localStorage.getItem(SETTINGS) ?? "{}");
}

function sampling() {
  const kept = settings();
  return Object.fromEntries(NUMBERS.filter((name) => kept[name]).map((name) => [name, Number(kept[name])]));
}

const form = $("settings").querySelector("form"), fields = form.elements;
$("chip").onclick = $("open-settings").onclick = () => {
  const kept = settings();
  for (const name of ["system", ...NUMBERS]) fields[name].value = kept[name] ?? "";
  fields.key.value = sessionStorage.getItem(KEY) ?? "";
  fields.model.replaceChildren(...models.map(({ id }) => new Option(id, id, false, id === chosen?.id)));
  $("model-choice").hidden = models.length < 2;
  $("settings").showModal();
};
$("close-settings").onclick = () => $("settings").close();
$("defaults").onclick = () => {
  for (const name of ["system", ...NUMBERS]) fields[name].value = "";
};
form.onsubmit = (event) => {
  event.preventDefault();
  const { key, ...kept } = Object.fromEntries(new FormData(form));
  localStorage.setItem(SETTINGS, JSON.stringify(kept));
  if (key.trim()) sessionStorage.setItem(KEY, key.trim());
  else sessionStorage.removeItem(KEY);
  $("settings").close();
  loadModels().catch(() => {});
};

watchHealth();
