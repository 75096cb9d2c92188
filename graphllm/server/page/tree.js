// A conversation as data. Its turns are a tree: an edit or a retry is a new turn next to the old one, and nothing that
// was said is lost. The conversation shown is the way from the root to `leaf`.

export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function newConversation() {
  return { id: newId(), title: "", changed: 0, leaf: null, turns: [] };
}

// A question to be answered. files: [{name, text}]. parent: the id of the turn before it, or null.
export function newTurn(parent, question, files) {
  return { id: newId(), parent, question, files, text: "", reasoning: "", calls: [], ending: null, error: null,
    figures: "", thought: "" };
}

// The turns that are shown, first to last.
export function shown(conversation) {
  const found = [];
  const byId = new Map(conversation.turns.map((turn) => [turn.id, turn]));
  for (let turn = byId.get(conversation.leaf); turn; turn = byId.get(turn.parent)) found.unshift(turn);
  return found;
}

// The turns that stand at the place of this one, oldest first.
export function siblings(conversation, turn) {
  return conversation.turns.filter((other) => other.parent === turn.parent);
}

// Shows the branch through this turn, down to its newest end.
export function choose(conversation, turn) {
  let leaf = turn;
  for (;;) {
    const next = conversation.turns.findLast((other) => other.parent === leaf.id);
    if (!next) break;
    leaf = next;
  }
  conversation.leaf = leaf.id;
}

export function add(conversation, turn) {
  conversation.turns.push(turn);
  conversation.leaf = turn.id;
  conversation.title ||= asTitle(turn.question || turn.files[0].name);
}

export const asTitle = (text) => text.replace(/\s+/g, " ").trim().slice(0, 80);

// Whether each word, in lower case, stands in the title, in a question or in an answer, whatever branch it is on.
export function mentions({ title, turns }, words) {
  const said = [title, ...turns.flatMap(({ question, text }) => [question, text])].join("\n").toLowerCase();
  return words.every((word) => said.includes(word));
}

// What came to nothing needs no branch: a turn without an answer and without turns after it goes.
export function dropIfEmpty(conversation, turn) {
  const said = turn.text || turn.reasoning || turn.calls.length;
  if (said || conversation.turns.some((other) => other.parent === turn.id)) return;
  conversation.turns.splice(conversation.turns.indexOf(turn), 1);
}

// A question as the model reads it: the files before it, each in a fence longer than any in it.
export function content({ question, files }) {
  const blocks = files.map(({ name, text }) => {
    const longest = Math.max(2, ...Array.from(text.matchAll(/`{3,}/g), ([run]) => run.length));
    const fence = "`".repeat(longest + 1);
    return `File ${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...blocks, question].filter(Boolean).join("\n\n");
}

// The messages that later turns send for this one: none if it has no answer. A call cut short is no JSON.
export function messages(turn) {
  const called = turn.ending === "tool_calls" && turn.calls.length;
  if (!turn.text && !called) return [];
  const calls = turn.calls.map(({ id, name, json }) => ({ id, type: "function", function: { name, arguments: json } }));
  return [{ role: "user", content: content(turn) },
    { role: "assistant", content: turn.text, ...(called && { tool_calls: calls }) }];
}
