// Markdown as plain elements: the safe and common part of it. Repetition is bounded, so that no text takes long.
import { codeBlock } from "./code.js";
import { el } from "./dom.js";
import { formula } from "./math.js";

const INLINE = new RegExp([
  /`([^`\n]{1,1000})`/,
  /\*\*([^*\s](?:[^*\n]|\*(?!\*)){0,1000}?)\*\*/,
  /(?<![*\w])\*([^*\s](?:[^*\n]{0,1000}?[^*\s])?)\*(?![*\w])/,
  /!?\[([^[\]\n]{1,300})\]\(((?:https?:\/\/|mailto:)(?:[^\s()]|\([^\s()]{0,200}\)){1,1000})\)/,
  /\$\$([^$\n]{1,1000})\$\$/,
  /\\\[([^\n]{1,1000}?)\\\]/,
  /\\\(([^\n]{1,1000}?)\\\)/,
  /(?<![\\\w$])\$(?![\s$])((?:\\.|[^\\$\n]){0,1000}(?:\\.|[^\\$\s]))\$(?![\d$])/,
  /(https?:\/\/[^\s<>"'`()[\]*]{0,1000}[^\s<>"'`()[\]*.,;:!?])/,
].map((part) => part.source).join("|"), "g");
const FENCE = /^ {0,3}(`{3,}|~{3,}) *([\w+#.-]*)[^`]*$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const HEADING = /^ {0,3}(#{1,6}) +(.*)$/;
const QUOTE = /^ {0,3}> ?/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const MATH = /^ {0,3}(\$\$|\\\[)/;
const DEEPEST = 8, MATH_LINES = 50;

// The line after a formula that begins on line n and has lines of its own, or 0: it may still be coming.
function mathEnd(lines, n) {
  const opens = MATH.exec(lines[n]);
  if (!opens) return 0;
  const closing = opens[1] === "$$" ? "$$" : "\\]";
  for (let i = n; i < Math.min(lines.length, n + MATH_LINES) && lines[i].trim(); i++) {
    const text = (i === n ? lines[i].slice(opens[0].length) : lines[i]).trimEnd();
    const at = text.indexOf(closing);
    if (at >= 0) return at === text.length - 2 ? i + 1 : 0;
  }
  return 0;
}

function link(target, text) {
  return el("a", { href: target, textContent: text, target: "_blank", rel: "noopener noreferrer" });
}

function inline(text) {
  const out = [];
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    const [whole, code, bold, italic, label, target, wide, boxed, round, dollars, bare] = match;
    out.push(text.slice(at, match.index));
    at = match.index + whole.length;
    if (code) out.push(el("code", { textContent: code }));
    else if (bold) out.push(el("strong", {}, ...inline(bold)));
    else if (italic) out.push(el("em", {}, ...inline(italic)));
    else if (wide ?? boxed) out.push(formula(wide ?? boxed, whole, true));
    else if (round ?? dollars) out.push(formula(round ?? dollars, whole, false));
    else out.push(link(target ?? bare, label ?? bare));
  }
  return [...out, text.slice(at)];
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
  const starts = (n) => [FENCE, ITEM, HEADING, QUOTE, RULE].some((start) => start.test(lines[n])) || tableAt(n)
    || mathEnd(lines, n) > 0;
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
      draw = () => codeBlock(fence[2], inside.join("\n"), fence[2]);
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
    } else if (mathEnd(lines, i)) {
      const end = mathEnd(lines, i), whole = lines.slice(i, end).join("\n");
      i = end;
      draw = () => el("p", {}, formula(whole.trim().slice(2, -2), whole, true));
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
export function update(box, text) {
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
