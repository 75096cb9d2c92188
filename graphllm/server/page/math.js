// Formulas, by KaTeX. Where it cannot read one, or has not come, the formula stands as it was written.
import { el } from "./dom.js";

const LONGEST = 4000;
const OPTIONS = { throwOnError: true, strict: "ignore", trust: false, maxExpand: 200, maxSize: 20 };
let library = null, loading = null;

// tex: what KaTeX reads. source: the text with its marks.
export function formula(tex, source, displayMode) {
  const node = el("span", { className: displayMode ? "formula scroll" : "formula", textContent: source });
  if (displayMode) node.tabIndex = 0; // a wide one is scrolled by keys
  if (tex.length <= LONGEST) draw(node, tex, displayMode);
  return node;
}

function load() {
  const href = new URL("vendor/katex/katex.min.css", import.meta.url).href;
  document.head.append(el("link", { rel: "stylesheet", href }));
  return import("./vendor/katex/katex.min.js").then(() => { library = globalThis.katex; }, () => {});
}

function draw(node, tex, displayMode) {
  loading ??= load();
  if (!library) {
    loading.then(() => library && draw(node, tex, displayMode));
    return;
  }
  const drawn = el("span");
  try {
    library.render(tex, drawn, { ...OPTIONS, displayMode });
  } catch {
    return;
  }
  node.replaceChildren(...drawn.childNodes);
}
