// Blocks of code with their button, and the colors of the languages that highlight.js knows.
import { copy, el, quiet } from "./dom.js";

const LONGEST = 20_000; // characters that are colored: it is done again with each piece that comes
const ENTITIES = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#x27;": "'" };
let library = null, loading = null;

export function codeBlock(title, text, language = "") {
  const button = quiet("Copy", () => copy(text, button));
  const code = el("code", { textContent: text });
  if (language && text.length <= LONGEST) color(code, text, language);
  const pre = el("pre", { tabIndex: 0, ariaLabel: title || "Code" }, code);
  return el("div", { className: "code" }, el("div", {}, el("span", { textContent: title }), button), pre);
}

// At once when the library is there; the first time, when it has come. Without it the code stays plain.
function color(code, text, language) {
  loading ??= import("./vendor/highlight/highlight.min.js").then((module) => { library = module.default; }, () => {});
  if (!library) loading.then(() => library && color(code, text, language));
  else if (library.getLanguage(language)) {
    code.replaceChildren(...nodes(library.highlight(text, { language, ignoreIllegals: true }).value));
  }
}

// The library writes HTML, of spans and five entities only. They are made here one by one: no text becomes HTML.
function nodes(html) {
  const root = el("code"), open = [root];
  for (const [, name, closing, text] of html.matchAll(/<span class="([^"]*)">|(<\/span>)|([^<]+)/g)) {
    if (text) open.at(-1).append(text.replace(/&(?:amp|lt|gt|quot|#x27);/g, (entity) => ENTITIES[entity]));
    else if (closing) open.pop();
    else {
      const inner = el("span", { className: name });
      open.at(-1).append(inner);
      open.push(inner);
    }
  }
  return root.childNodes;
}
