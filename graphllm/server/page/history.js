// The list of kept conversations: search, open, rename, delete, export, import.
import { $, count, el, quiet } from "./dom.js";
import { all, list, load, onNews, remove, rename, save, search } from "./store.js";
import { download, readConversations } from "./transfer.js";
import { asTitle } from "./tree.js";

const dialog = $("history"), notice = $("history-notice"), shown = $("conversations"), wanted = $("search");
let acts = null, typing = 0;

// act: {open, removed, current}: shows a conversation; hears that one is gone; gives the one on the page.
export function startHistory(act) {
  acts = act;
  onNews(() => dialog.open && !shown.querySelector("input") && refresh()); // a title that is being edited stays
}

async function refresh() {
  const words = wanted.value.toLowerCase().split(/\s+/).filter(Boolean);
  const heads = words.length ? await search(words) : await list();
  $("no-conversations").hidden = heads.length > 0;
  $("no-conversations").textContent = words.length ? "Nothing found."
    : "None yet. They are kept in this browser only.";
  shown.replaceChildren(...heads.map(item));
}

function item({ id, title, changed }) {
  const when = new Date(changed).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
  const opening = el("button", { type: "button", className: "open", onclick: () => show(id) },
    el("span", { textContent: title, dir: "auto" }), el("time", { textContent: when }));
  if (id === acts.current().id) opening.ariaCurrent = "true";
  const renaming = quiet("Rename", () => editTitle(row, id, title));
  renaming.ariaLabel = `Rename ${title}`;
  const deleting = quiet("Delete", () => discard(id, title));
  deleting.ariaLabel = `Delete ${title}`;
  const row = el("li", {}, opening, renaming, deleting);
  row.dataset.id = id;
  return row;
}

// Puts a field in place of a row; Enter keeps what is in it, Escape and leaving it do not.
function editTitle(row, id, title) {
  const field = el("input", { value: title, maxLength: 80, ariaLabel: `Title of ${title}`, dir: "auto" });
  let over = false;
  const end = async (kept) => {
    if (over) return;
    over = true;
    if (kept) await attempt(async () => rename(await find(id), asTitle(field.value) || title));
    await refresh();
    if (kept !== null) [...shown.children].find((one) => one.dataset.id === id)?.querySelector(".rename").focus();
  };
  field.onkeydown = (event) => {
    if (event.isComposing || !["Enter", "Escape"].includes(event.key)) return;
    event.preventDefault(); // Escape would close the dialog
    end(event.key === "Enter");
  };
  field.onblur = () => end(null);
  row.replaceChildren(field);
  field.select();
}

// Does it, and says in the dialog what went wrong.
async function attempt(work) {
  notice.textContent = "";
  try {
    await work();
  } catch (reason) {
    notice.textContent = reason.message;
  }
}

async function find(id) {
  const found = id === acts.current().id ? acts.current() : await load(id);
  if (!found) throw new Error("This conversation was deleted in another tab.");
  return found;
}

const show = (id) => attempt(async () => {
  acts.open(await find(id));
  dialog.close();
});

const discard = (id, title) => attempt(async () => {
  if (!confirm(`Delete “${title}” for good?`)) return;
  acts.removed(id);
  await remove(id);
  await refresh();
});

$("open-history").onclick = async () => {
  notice.textContent = wanted.value = "";
  await refresh();
  dialog.showModal();
};
wanted.oninput = () => {
  clearTimeout(typing);
  typing = setTimeout(refresh, 150);
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
    notice.textContent = `${count(found.length)} imported.`;
  } finally {
    $("import-file").value = ""; // the same file may be chosen again
    await refresh();
  }
});
