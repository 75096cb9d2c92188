// The server's models, which of them is asked, and whether the server can answer.
import { $, count, el } from "./dom.js";
import { explain, health, request } from "./server.js";
import { settings } from "./settings.js";

export let models = [], chosen = null;

export async function loadModels() {
  const response = await request("v1/models");
  if (!response.ok) throw new Error(await explain(response));
  models = (await response.json()).data;
  chosen = models.find((model) => model.id === settings().model) ?? models[0];
  const version = await request("version").then((r) => r.json()).then((v) => v.version, () => null);
  show(chosen, version);
}

function show(model, version) {
  document.title = `${model.id} · graphllm`;
  $("chip-name").textContent = model.id;
  $("greeting").textContent = `Ask ${model.id}`;
  const context = model.max_model_len && `${count(model.max_model_len)} tokens`;
  const facts = [["Model", model.id], ["Context", context], ["Loaded from", model.root], ["Owner", model.owned_by],
    ["Server", version && `graphllm ${version}`]].filter(([, value]) => value);
  for (const card of document.querySelectorAll(".card")) {
    card.hidden = false;
    card.replaceChildren(...facts.flatMap(([name, value]) => [el("dt", { textContent: name }), el("dd", {}, value)]));
  }
}

async function checkHealth() {
  const [level, cause] = await health();
  document.body.dataset.health = level;
  $("chip-health").textContent = cause || "Ready";
  if ($("cause").textContent !== cause) $("cause").textContent = cause;
  $("cause").hidden = !cause;
  return level;
}

export async function watchHealth() {
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
