// One answer: asks the server for it and writes what comes into the turn, with how long it took.
import { count, span } from "./dom.js";
import { explain, request, serverEvents } from "./server.js";

// body: of the request. changed: called whenever there is more to show. Ends with the answer, whatever became of it.
export async function answer(turn, body, signal, changed) {
  const times = { sent: 0, first: 0, last: 0, pieces: 0, usage: null };
  try {
    const response = await request("v1/chat/completions", {
      method: "POST", headers: { "Content-Type": "application/json" }, signal,
      body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    }, () => { times.sent = performance.now(); });
    if (!response.ok) throw new Error(await explain(response));
    for await (const data of serverEvents(response.body)) {
      if (data === "[DONE]") break;
      take(turn, times, JSON.parse(data));
      turn.figures = figures(turn, times);
      changed();
    }
    if (!turn.ending) throw new Error("The connection ended before the answer did.");
  } catch (reason) {
    if (signal.aborted) turn.ending = "stopped";
    else if (reason instanceof TypeError) turn.error = "The server does not answer, or the connection broke.";
    else turn.error = reason.message;
  }
  turn.calls = turn.calls.filter(Boolean);
  turn.figures = figures(turn, times);
}

function take(turn, times, chunk) {
  if (chunk.error) throw new Error(chunk.error.message);
  if (chunk.usage) times.usage = chunk.usage;
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const { content, reasoning_content, reasoning, tool_calls } = choice.delta;
  const thoughts = reasoning_content ?? reasoning;
  if (content || thoughts || tool_calls) {
    times.last = performance.now();
    times.first ||= times.last;
    times.pieces++;
  }
  if (thoughts) turn.reasoning += thoughts;
  if (content) turn.text += content;
  for (const { index, id, function: { name, arguments: json } = {} } of tool_calls ?? []) {
    const call = (turn.calls[index] ??= { id: id ?? "", name: "", json: "" });
    call.name += name ?? "";
    call.json += json ?? "";
  }
  if (turn.reasoning && !turn.thought && (content || tool_calls || choice.finish_reason)) {
    turn.thought = span(performance.now() - times.first);
  }
  turn.ending = choice.finish_reason ?? turn.ending;
}

function figures({ ending }, { usage, first, last, sent, pieces }) {
  const made = usage?.completion_tokens ?? pieces, about = usage ? "" : "≈ ";
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  const rate = made > 1 && last > first ? ((made - 1) * 1000) / (last - first) : null;
  return [
    rate && `${about}${rate < 100 ? rate.toFixed(1) : count(Math.round(rate))} tokens/s`,
    first && `first token ${span(first - sent)}`,
    usage && `${count(usage.prompt_tokens)} in${cached ? ` (${count(cached)} cached)` : ""}`,
    made && `${about}${count(made)} out`,
    ending === "stopped" && "stopped",
    ending === "length" && "cut at the token limit",
  ].filter(Boolean).join(" · ");
}
