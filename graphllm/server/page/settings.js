// Settings: what is sent with each question, and how the page looks. They stay in this browser; the key in this tab.
import { $ } from "./dom.js";
import { KEY } from "./server.js";

const STORED = "graphllm.settings";
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
  "repetition_penalty", "max_tokens", "seed"];
const form = $("settings").querySelector("form"), fields = form.elements;

export function settings() {
  return JSON.parse(localStorage.getItem(STORED) ?? "{}");
}

// The fields of a request that were set: what was left empty is the server's to choose.
export function sampling() {
  const kept = settings();
  return Object.fromEntries(NUMBERS.filter((name) => kept[name]).map((name) => [name, Number(kept[name])]));
}

export function applyTheme() {
  document.documentElement.dataset.theme = settings().theme ?? "";
}

// models: those to choose from. saved: called after the settings were stored.
export function editSettings(models, chosen, saved) {
  const kept = settings();
  for (const name of ["system", "theme", ...NUMBERS]) fields[name].value = kept[name] ?? "";
  fields.key.value = sessionStorage.getItem(KEY) ?? "";
  fields.model.replaceChildren(...models.map(({ id }) => new Option(id, id, false, id === chosen?.id)));
  $("model-choice").hidden = models.length < 2;
  form.onsubmit = (event) => {
    event.preventDefault();
    const { key, ...given } = Object.fromEntries(new FormData(form));
    localStorage.setItem(STORED, JSON.stringify(given));
    if (key.trim()) sessionStorage.setItem(KEY, key.trim());
    else sessionStorage.removeItem(KEY);
    $("settings").close();
    applyTheme();
    saved();
  };
  $("settings").showModal();
}

$("close-settings").onclick = () => $("settings").close();
$("defaults").onclick = () => {
  for (const name of ["system", "theme", ...NUMBERS]) fields[name].value = "";
};
