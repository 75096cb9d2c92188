// The list of kept conversations: open, delete, export, import.
import { $, count, el, quiet } from "./dom.js";
import { all, list, load, onNews, remove, save } from "./store.js";
import { download, readConversations } from "./transfer.js";

const dialog = $("history"), told = $("history-told");
let acts = null;

// act: {open, removed, current}: shows a conversation; hears that one is gone; gives the one on the page.
export function startHistory(act) {
  acts = act;
  onNews(() => dialog.open && refresh());
}

async function refresh() {
  const heads = await list();
  $("no-conversations").hidden = heads.length > 0;
  $("conversations").replaceChildren(...heads.map(item));
}

function item({ id, title, changed }) {
  const when = new Date(changed).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
  const opening = el("button", { type: "button", className: "open", onclick: () => show(id) },
    el("span", { textContent: title, dir: "auto" }), el("time", { textContent: when }));
  if (id === acts.current().id) opening.ariaCurrent = "true";
  const deleting = quiet("Delete", () => discard(id, title));
  deleting.ariaLabel = `Delete ${title}`;
  return el("li", {}, opening, deleting);
}

// Does it, and says in the dialog what went wrong.
async function attempt(work) {
  told.textContent = "";
  try {
    await work();
  } catch (reason) {
    told.textContent = reason.message;
  }
}

const show = (id) => attempt(async () => {
  const found = id === acts.current().id ? acts.current() : await load(id);
  if (!found) throw new Error("This conversation was deleted in another tab.");
  acts.open(found);
  dialog.close();
});

const discard = (id, title) => attempt(async () => {
  if (!confirm(`Delete “${title}” for good?`)) return;
  acts.removed(id);
  await remove(id);
  await refresh();
});

$("open-history").onclick = async () => {
  told.textContent = "";
  await refresh();
  dialog.showModal();
};
$("close-history").onclick = () => dialog.close();
$("export").onclick = () => attempt(async () => download(await all()));
$("import").onclick = () => $("import-file").click();
$("import-file").onchange = () => attempt(async () => {
  const [file] = $("import-file").files;
  if (!file) return;
  try {
    const found = await readConversations(file, await list());
    await save(...found);
    told.textContent = `${count(found.length)} imported.`;
  } finally {
    $("import-file").value = ""; // the same file may be chosen again
    await refresh();
  }
});
