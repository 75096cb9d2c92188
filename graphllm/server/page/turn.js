// One turn on the page: the question, its answer as it grows, what can be done with both.
import { fileList } from "./attach.js";
import { codeBlock } from "./code.js";
import { copy, el, quiet } from "./dom.js";
import { update } from "./markdown.js";

export class TurnView {
  busy = false;
  frame = 0;

  // act: what the buttons do, as {retry, edit, choose}, each called with a turn. painted: called after each change.
  constructor(turn, act, painted) {
    this.turn = turn;
    this.act = act;
    this.painted = painted;
    const retry = () => act.retry(turn);
    this.waiting = el("span", { className: "waiting" });
    this.thinking = el("details", { className: "thinking", open: !turn.thought }, el("summary"), el("div"));
    this.prose = el("div", { className: "prose" });
    this.callBox = el("div");
    this.alert = el("div", { className: "error", role: "alert", hidden: true }, el("span"),
      el("button", { type: "button", className: "retry", textContent: "Retry", onclick: retry }));
    this.figures = el("div", { className: "figures", ariaLive: "off" });
    const copying = quiet("Copy", () => copy(turn.text, copying));
    this.tools = el("div", { className: "tools" }, copying, quiet("Retry", retry));
    this.answer = el("article", { className: "answer", ariaLabel: "Answer" },
      this.thinking, this.prose, this.callBox, this.waiting, this.alert, this.figures, this.tools);
    const copyAsked = quiet("Copy", () => copy(turn.question, copyAsked));
    this.branches = el("span", { className: "branches", role: "group", ariaLabel: "Branches", hidden: true });
    const files = el("ul", { className: "files", hidden: !turn.files.length, ariaLabel: "Files" },
      ...fileList(turn.files));
    this.root = el("section", { className: "turn" },
      el("article", { className: "asked", ariaLabel: "You" }, files,
        el("p", { dir: "auto", textContent: turn.question, hidden: !turn.question }),
        el("div", { className: "tools" }, this.branches, copyAsked, quiet("Edit", () => act.edit(turn)))),
      this.answer);
  }

  // siblings: all turns at this place, this one among them.
  showBranches(siblings) {
    const at = siblings.indexOf(this.turn);
    const step = (sign, label, other) => el("button", { type: "button", className: "quiet", textContent: sign,
      ariaLabel: label, disabled: !other, onclick: () => this.act.choose(other) });
    this.branches.hidden = siblings.length < 2;
    this.branches.replaceChildren(step("‹", "Branch before", siblings[at - 1]), `${at + 1}/${siblings.length}`,
      step("›", "Next branch", siblings[at + 1]));
  }

  // At the next frame: pieces come faster than a screen shows them.
  repaint() {
    this.frame ||= requestAnimationFrame(() => this.paint());
  }

  paint() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const { text, reasoning, thought, error, figures } = this.turn;
    const calls = this.turn.calls.filter(Boolean);
    this.answer.classList.toggle("busy", this.busy);
    this.answer.ariaBusy = String(this.busy);
    this.thinking.hidden = !reasoning;
    const [summary, thoughts] = this.thinking.children;
    const label = thought ? `Thought for ${thought}` : this.busy ? "Thinking" : "Thoughts";
    if (thought && summary.textContent !== label) this.thinking.open = false;
    summary.textContent = label;
    if (thoughts.textContent !== reasoning) thoughts.textContent = reasoning;
    update(this.prose, text);
    this.callBox.replaceChildren(
      ...calls.map(({ name, json }) => codeBlock(`Tool call: ${name}`, pretty(json), "json")));
    this.waiting.hidden = !this.busy || Boolean(text || calls.length);
    this.alert.hidden = !error;
    this.alert.firstChild.textContent = error ?? "";
    this.figures.textContent = figures;
    this.tools.hidden = this.busy || Boolean(error && !text);
    this.tools.firstChild.hidden = !text;
    this.painted();
  }
}

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // still coming
  }
}
