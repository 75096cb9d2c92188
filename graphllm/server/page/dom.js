// Small makers of elements, and what their buttons do.
export const $ = (id) => document.getElementById(id);

export function el(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

export function quiet(text, onclick) {
  return el("button", { type: "button", className: `quiet ${text.toLowerCase()}`, textContent: text, onclick });
}

export async function copy(text, button) {
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

// Tells what went wrong with no turn to show it at; it stays until it is dismissed.
export function tell(message) {
  const [text, dismiss] = $("notice").children;
  text.textContent = message;
  dismiss.onclick = () => { $("notice").hidden = true; };
  $("notice").hidden = false;
}

export const count = (n) => n.toLocaleString("en");
export const span = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);
