"use strict";
// Everything that is shown comes from /activity and /downloads. Text becomes text nodes only, never markup:
// the page's Content-Security-Policy would refuse anything else.

const BUSY_MS = 2000, IDLE_MS = 5000, DOWNLOADS_MS = 10000, PATIENCE_MS = 10000;
const KEY = "start_llm key";
const byId = id => document.getElementById(id);
const number = new Intl.NumberFormat("en");

// ------------------------------------------------------------------------------------------------- elements

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Make `list` show `items`. An item's element stays the same and in place, so that it keeps the focus. */
function show(list, items, nameOf, create, update = () => {}) {
  const known = new Map([...list.children].map(child => [child.dataset.name, child])), used = new Set();
  items.forEach((item, place) => {
    const name = nameOf(item);
    let element = known.get(name);
    if (!element || used.has(element)) {
      element = create(item);
      element.dataset.name = name;
    }
    used.add(element);
    update(element, item);
    if (list.children[place] !== element) list.insertBefore(element, list.children[place] ?? null);
  });
  for (const child of [...list.children]) if (!used.has(child)) child.remove();
}

// ---------------------------------------------------------------------------------------------------- words

const count = (value, one, many = `${one}s`) => `${number.format(value)} ${value === 1 ? one : many}`;
const tokens = value => count(value, "token");
const rate = perSecond => (perSecond === null ? "" : `${number.format(perSecond >= 100 ? Math.round(perSecond) : perSecond)} tok/s`);
const label = one => (one.name.startsWith(one.session.slice(0, 6)) ? one.name : `${one.session.slice(0, 6)} ${one.name}`);
const clock = seconds => new Date(seconds * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const were = value => `${number.format(value)} ${value === 1 ? "was" : "were"}`;
const percent = (part, whole) => `${Math.floor(100 * part / whole)} %`;

function bytes(value) {
  if (value >= 2 ** 30) return `${(value / 2 ** 30).toFixed(1)} GiB`;
  return value >= 2 ** 20 ? `${(value / 2 ** 20).toFixed(1)} MiB` : `${Math.ceil(value / 1024)} KiB`;
}

function duration(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function savedSentence(element, saved, span) {
  if (!saved.prompt_tokens) return say(element, `No prompt was read in the last ${span}.`);
  const share = make("strong", {}, `${number.format(saved.cached_tokens)} of ${tokens(saved.prompt_tokens)}`);
  const time = saved.saved_seconds === null || saved.saved_seconds < 1 ? "" : ` Reading them would have taken about ${duration(saved.saved_seconds)}.`;
  const rest = ` of all prompts in the last ${span} did not have to be read again (${percent(saved.cached_tokens, saved.prompt_tokens)}).${time}`;
  if (element.textContent !== share.textContent + rest) element.replaceChildren(share, rest);
}

function showSaved({ hour, day }) {
  const { cached_tokens: cached, prompt_tokens: all, saved_seconds: seconds } = day;
  say(byId("saved-figure"), seconds === null || seconds < 1 ? (all ? percent(cached, all) : "–") : duration(seconds));
  const parts = all ? [["cached", cached], ["new", all - cached]] : [["free", 1]];
  show(byId("saved-bar"), parts, ([name]) => name, ([name]) => make("span", { class: name }),
    (element, [, value]) => element.style.setProperty("flex-grow", String(value / Math.max(all, 1))));
  savedSentence(byId("saved-hour"), hour, "hour");
  savedSentence(byId("saved-day"), day, "day");
}

// --------------------------------------------------------------------------------------------------- panels

function showDrafts({ pays, drafted_tokens: drafted, accepted_tokens: right, saved_seconds: saved }) {
  const none = pays ? "No reply has been drafted so far." : "Replies are not drafted: that is not faster here, or it is off.";
  const some = `${number.format(right)} of ${tokens(drafted)} that were drafted since the start were right: ${count(right, "pass", "passes")} of the model less, ${duration(Math.max(saved, 0))} saved.`;
  say(byId("saved-drafts"), drafted ? some : none);
}

function showHeadline(now) {
  const loaded = now.models.filter(one => one.state === "loaded").map(one => one.id);
  const loading = now.models.filter(one => one.state === "loading").map(one => one.id);
  const parts = [loaded.length ? `${loaded.join(" and ")} ${loaded.length === 1 ? "is" : "are"} loaded` : "No model is loaded"];
  if (loading.length) parts.push(`${loading.join(" and ")} is being loaded`);
  say(byId("headline"), `${parts.join("; ")}. Computing on ${now.device || "this machine"} since ${new Date(now.started_at * 1000).toLocaleString()}.`);
}

function progressOf(one) {
  if (one.phase === "waiting") return `Waits for its turn with ${tokens(one.prompt_tokens)}, for ${duration(one.seconds)} so far.`;
  const kept = one.cached_tokens ? ` Of them ${were(one.cached_tokens)} kept from before.` : "";
  if (one.phase === "reading") return `Reads its prompt: ${number.format(one.done_tokens)} of ${tokens(one.prompt_tokens)} in ${duration(one.seconds)}.${kept}`;
  return `Writes its reply: ${tokens(one.written_tokens)} so far, after a prompt of ${tokens(one.prompt_tokens)}, in ${duration(one.seconds)}.`;
}

function showRunning(now) {
  const others = now.running_of_others ? ` ${count(now.running_of_others, "request")} with other keys ${now.running_of_others === 1 ? "is" : "are"} running.` : "";
  const own = now.running.length ? `${count(now.running.length, "request")} ${now.running.length === 1 ? "is" : "are"} running.` : "No request is running.";
  say(byId("running-summary"), own + others);
  show(byId("running"), now.running, one => one.id,
    one => make("li", {}, who(one, `Session ${label(one)}`),
      make("div", {}, make("p", { class: "what" }, make("span", { class: "rate" }), make("span")),
        make("progress", { "aria-label": `Prompt of session ${label(one)}, read so far` }))),
    (element, one) => {
      say(element.querySelector(".rate"), rate(one.tokens_per_second));
      say(element.querySelector(".rate + span"), progressOf(one));
      const bar = element.querySelector("progress");
      bar.max = Math.max(one.prompt_tokens, 1);
      bar.value = one.done_tokens;
    });
}

/** Who has asked: the session, the program, the protocol and the model. */
function who(one, name) {
  const words = [one.client, one.endpoint.replace("/v1/", ""), one.model].filter(Boolean).join(" · ");
  return make("div", {}, make("span", { class: "name" }, name), make("p", { class: "what" }, words));
}

const PARTS = {
  weights: "weights: the models themselves",
  pages: "pages: prompts that were read before",
  checkpoints: "checkpoints: places from which a conversation can go on",
  sequence_caches: "conversations that rest",
  live: "conversations that run",
  images: "images that the model has seen",
  free: "free, for computing and for more of these",
};

function showMemory(now) {
  const { budget_bytes: budget, parts, free_bytes: free } = now.memory;
  const all = Object.entries({ ...parts, free }).filter(([name, value]) => value || name === "weights");
  say(byId("memory-summary"), budget ? `${bytes(budget - free)} of the ${bytes(budget)} that the server may use are in use.` : "The server does not say how much memory it may use.");
  show(byId("memory-bar"), all, ([name]) => name, ([name]) => make("span", { class: name }),
    (element, [, value]) => element.style.setProperty("flex-grow", String(value / Math.max(budget, 1))));
  show(byId("memory-legend"), all, ([name]) => name,
    ([name]) => make("li", {}, make("span", { class: `swatch ${name}` }), make("span")),
    (element, [name, value]) => say(element.lastChild, `${bytes(value)} ${PARTS[name]}`));
}

function turnSentence(turn) {
  const again = turn.again_tokens ? `, ${number.format(turn.again_tokens)} read again because ${turn.reason}` : "";
  return `${clock(turn.ended_at)}: ${tokens(turn.cached_tokens)} kept, ${number.format(turn.new_tokens)} new${again}.`;
}

/** Set the columns of the grid: one for each turn, and before each later one a gap for the time that passed. */
function setTimeAxis(list, turns) {
  const all = Math.max(turns.at(-1).ended_at - turns[0].ended_at, 1e-3);
  const gaps = turns.slice(1).map((turn, place) => Math.round(1000 * (turn.ended_at - turns[place].ended_at) / all));
  list.style.setProperty("grid-template-columns", ["var(--turn)", ...gaps.map(gap => `minmax(3px, ${Math.max(gap, 1)}fr) var(--turn)`)].join(" "));
}

function showTurns(list, turns) {
  setTimeAxis(list, turns);
  const longest = Math.max(...turns.map(one => one.cached_tokens + one.new_tokens + one.again_tokens), 1);
  show(list, turns, turn => String(turn.ended_at), turn => {
    const kinds = ["again", "new", "cached"].map(kind => make("span", { class: kind }));
    return make("li", { title: turnSentence(turn) }, ...kinds, make("span", { class: "sr" }, turnSentence(turn)));
  }, (element, turn) => {
    element.style.setProperty("grid-column", String(2 * turns.indexOf(turn) + 1));
    ["again", "new", "cached"].forEach((kind, place) =>
      element.children[place].style.setProperty("height", `${100 * turn[`${kind}_tokens`] / longest}%`));
  });
}

/** Add what is new to what the page knows, the newest first; the server forgets the oldest, too. */
function addRecords(now) {
  if (now.is_whole) for (const list of Object.values(known)) list.clear();
  for (const one of now.conversations.toReversed()) {
    const before = known.conversations.get(one.session)?.turns ?? [];
    put(known.conversations, one.session, { ...one, turns: [...before, ...one.turns].slice(-MOST.turns) });
  }
  for (const one of now.recent.toReversed()) put(known.recent, `${one.id} ${one.ended_at}`, one);
  for (const one of now.refused.toReversed()) put(known.refused, `${one.method} ${one.path} ${one.status} ${one.reason}`, one);
  const newest = list => [...list].toReversed();
  showConversations(newest(known.conversations));
  showRecent(newest(known.recent));
  showRefused(newest(known.refused));
}

let chosen = ""; // the model that the chat asks for; empty: the one that was used last
const known = { conversations: new Map(), recent: new Map(), refused: new Map() };
const MOST = { records: 50, turns: 24 };

function put(records, name, record) {
  records.delete(name);
  records.set(name, record);
  if (records.size > MOST.records) records.delete(records.keys().next().value);
}

function showConversations(conversations) {
  say(byId("conversations-summary"), conversations.length ? "Each column is one turn, and its height the length of its prompt; the gap before it is the time that passed." : "No conversation so far.");
  show(byId("conversations"), conversations, ([name]) => name,
    ([, one]) => {
      const item = make("li", {}, who({ ...one, endpoint: "" }, `Session ${label(one)}`),
        make("ol", { class: "turns", "aria-label": `Turns of session ${label(one)}` }),
        make("p", { class: "axis", "aria-hidden": "true" }, make("span"), make("span")));
      item.firstChild.append(make("p", { class: "what last" }));
      return item;
    },
    (element, [, one]) => {
      say(element.querySelector(".last"), `Last turn at ${turnSentence(one.turns.at(-1))}`);
      showTurns(element.querySelector("ol"), one.turns);
      const ends = one.turns.length > 1 ? [one.turns[0], one.turns.at(-1)] : [one.turns[0]];
      ends.forEach((turn, place) => say(element.querySelector(".axis").children[place], clock(turn.ended_at)));
    });
}

const ENDINGS = {
  stop: "complete", length: "at its limit of tokens", tool_calls: "ended with calls of tools", cancelled: "its client left before the end",
  deadline: "ended by the server's time limit", repetition: "ran away", failed: "failed",
};

function requestFigures(one) {
  const speed = perSecond => (perSecond === null ? "" : ` at ${rate(perSecond)}`);
  return [`${number.format(one.cached_tokens)} kept`, `${number.format(one.computed_tokens)} read${speed(one.read_per_second)}`,
    `${number.format(one.written_tokens)} written${speed(one.written_per_second)}`,
    ...(one.ttft_seconds === null ? [] : [`first after ${duration(one.ttft_seconds)}`]), ENDINGS[one.ending] ?? one.ending].join(" · ");
}

function finishedRequest(one) {
  const item = make("li", {}, who(one, `${clock(one.ended_at)} · Session ${label(one)}`), make("p", { class: "what" }, requestFigures(one)));
  if (one.again_tokens) item.append(make("p", { class: "whole" }, `${tokens(one.again_tokens)} had to be read again: ${one.reason}.`));
  if (one.has_difference) item.append(differenceButton(one));
  return item;
}

function differenceButton(one) {
  const texts = make("div", { class: "texts", id: `texts-${one.id}`, hidden: "" });
  const button = make("button", { type: "button", class: "small", "aria-expanded": "false", "aria-controls": texts.id },
    `Show what differs at ${clock(one.ended_at)}`);
  button.addEventListener("click", async () => {
    texts.hidden = !texts.hidden;
    button.setAttribute("aria-expanded", String(!texts.hidden));
    if (texts.hidden || texts.children.length) return;
    try {
      const difference = await ask(`/activity/${encodeURIComponent(one.id)}`);
      texts.replaceChildren(make("p", {}, "Read before:"), make("pre", {}, difference.computed || "(nothing)"),
        make("p", {}, "In this request:"), make("pre", {}, difference.asked || "(nothing)"));
    } catch (error) {
      texts.replaceChildren(make("p", { class: "alarm" }, error.message));
    }
  });
  return make("div", { class: "whole" }, button, texts);
}

function showRecent(recent) {
  say(byId("recent-summary"), recent.length ? "The newest request is at the top." : "No request has ended so far.");
  show(byId("recent"), recent, ([name]) => name, ([, one]) => finishedRequest(one));
}

function showRefused(refused) {
  say(byId("refused-summary"), refused.length ? "These requests were refused before the model saw them." : "No request was refused.");
  show(byId("refused"), refused, ([name]) => name,
    () => make("li", {}, make("span", { class: "name" }), make("p")), (element, [, one]) => {
      const times = one.times > 1 ? `${number.format(one.times)} times, last at ` : "";
      say(element.firstChild, `${times}${clock(one.last_at)} · ${`${one.method} ${one.path}`.trim() || "a request"}`);
      say(element.lastChild, `Refused with ${one.status}: ${one.reason}`);
    });
}

function showDisk(now) {
  const disk = now.ssd;
  if (!disk || disk.state.startsWith("off")) return say(byId("ssd"), "The disk tier is off: what was read is lost when the server stops.");
  const state = { on: "is on", scanning: "looks through its files", paused: "pauses, since it cannot write" }[disk.state] ?? disk.state;
  const hits = disk.hits ? `${count(disk.hits, "prompt")} found ${tokens(disk.restored_tokens)} there and waited ${duration(disk.restored_seconds)} for them.` : "No prompt has needed it so far.";
  const queue = disk.queue ? ` ${count(disk.queue, "file")} ${disk.queue === 1 ? "waits" : "wait"} to be written.` : "";
  say(byId("ssd"), `The disk tier ${state}: ${count(disk.files, "file")} with ${bytes(disk.bytes)} of at most ${bytes(disk.max_bytes)}. ${hits} ${bytes(disk.written_today_bytes)} were written today.${queue}`);
}

// ------------------------------------------------------------------------------------- models and downloads

function modelState(one) {
  if (one.state !== "loaded") return one.state === "loading" ? "is being loaded" : "not loaded";
  return one.in_flight ? `loaded, answers ${count(one.in_flight, "request")}` : "loaded, idle";
}

function showModels(now) {
  show(byId("models"), now.models, one => one.id,
    one => {
      const button = make("button", { type: "button", class: "small" }, make("span"), make("span", { class: "sr" }, ` ${one.id}`));
      button.addEventListener("click", () => change(one.id, button.dataset.action));
      return make("tr", {}, make("th", { scope: "row", class: "name" }, one.id), make("td"), make("td"), make("td", {}, button));
    },
    (element, one) => {
      const [, state, size, { firstChild: button }] = element.children;
      say(state, modelState(one));
      say(size, one.context_window === null ? "" : number.format(one.context_window));
      button.dataset.action = one.state === "loaded" ? "unload" : "load";
      button.hidden = one.state === "loading";
      say(button.firstChild, one.state === "loaded" ? "Unload" : "Load");
    });
  const choices = [{ id: "", text: "the one that was used last" }, ...now.models.map(one => ({ id: one.id, text: one.id }))];
  show(byId("chat-model"), choices, one => `model ${one.id}`, one => make("option", { value: one.id }, one.text));
  if (chosen && byId("chat-model").value !== chosen) byId("chat-model").value = chosen;
}

async function change(name, action) {
  const state = byId("models-state");
  say(state, `Asked the server to ${action} ${name} …`);
  try {
    await ask(`/v1/models/${encodeURIComponent(name)}/${action}`, { method: "POST" }, 0);
    say(state, `Done: ${action} ${name}.`);
  } catch (error) {
    say(state, error.message);
  }
  poll();
}

function downloadSentence(one) {
  const size = one.total_bytes ? `${bytes(one.received_bytes)} of ${bytes(one.total_bytes)}` : bytes(one.received_bytes);
  const speed = one.bytes_per_sec ? `, ${bytes(one.bytes_per_sec)} each second` : "";
  return `is ${one.state}: ${size}${speed}.${one.error ? ` ${one.error}` : ""}`;
}

let downloadsAt = 0;
async function showDownloads() {
  if (Date.now() - downloadsAt < DOWNLOADS_MS) return;
  downloadsAt = Date.now();
  const { downloads } = await ask("/downloads");
  say(byId("downloads-summary"), downloads.length ? "" : "No model was downloaded since the start.");
  show(byId("downloads"), downloads, one => one.id, one => make("li", {}, make("span", { class: "name" }, one.repo_id), " ", make("span")),
    (element, one) => say(element.lastChild, downloadSentence(one)));
}

// -------------------------------------------------------------------------------------------------- polling

class KeyNeeded extends Error {}

function key() {
  try { return sessionStorage.getItem(KEY) ?? ""; } catch { return ""; }
}

function headers(more = {}) {
  return key() ? { ...more, Authorization: `Bearer ${key()}` } : more;
}

async function checked(reply) {
  if (reply.ok) return reply;
  const body = await reply.json().catch(() => ({}));
  const message = body.error?.message ?? `The server answered ${reply.status}.`;
  throw reply.status === 401 ? new KeyNeeded(message) : new Error(message);
}

async function ask(path, options = {}, patience = PATIENCE_MS) {
  const signal = patience ? AbortSignal.timeout(patience) : undefined;
  const reply = await fetch(path, { ...options, signal, headers: headers(), cache: "no-store" });
  return (await checked(reply)).json();
}

const asksKey = document.documentElement.dataset.asksKey === "true";
let version = "", timer = 0, isPolling = false, pause = IDLE_MS, needsKey = false, wantsKey = false;

function later(delay) {
  clearTimeout(timer);
  if (document.visibilityState === "visible" && !needsKey) timer = setTimeout(poll, delay);
}

function showKey() {
  say(byId("key-title"), needsKey ? "This server asks for a key" : "See what a key has sent");
  say(byId("change-key"), key() ? "Forget the key" : "Use a key");
  byId("change-key").hidden = needsKey && !key();
  byId("key-panel").hidden = !needsKey && !wantsKey;
  byId("panels").hidden = needsKey;
}

function demandKey(message) {
  needsKey = message !== null;
  showKey();
  if (!needsKey) return;
  say(byId("headline"), "The server is running.");
  say(byId("key-problem"), key() ? message : "");
  if (byId("panels").contains(document.activeElement) || document.activeElement === document.body) byId("key").focus();
}

async function poll() {
  if (isPolling || document.visibilityState !== "visible") return;
  isPolling = true;
  const usedKey = key();
  try {
    if (asksKey && !usedKey) throw new KeyNeeded("");
    const now = await ask(`/activity?since=${encodeURIComponent(version)}`);
    if (key() !== usedKey) return;
    version = now.version;
    demandKey(null);
    pause = now.running.length || now.running_of_others ? BUSY_MS : IDLE_MS;
    showSaved(now.saved);
    showDrafts(now.speculation);
    for (const panel of [showHeadline, showRunning, showMemory, showDisk, showModels]) panel(now);
    if (now.is_whole || now.recent.length || now.refused.length) addRecords(now);
    await showDownloads();
    say(byId("connection"), "");
  } catch (error) {
    pause = IDLE_MS;
    if (key() !== usedKey) return;
    if (error instanceof KeyNeeded) demandKey(error.message);
    else say(byId("connection"), `No news from the server (${error.message}). The page tries again every ${IDLE_MS / 1000} seconds.`);
  } finally {
    isPolling = false;
    if (key() !== usedKey) { // what came is for the key before
      needsKey = false;
      version = "";
      pause = 0;
    }
    later(pause);
  }
}

document.addEventListener("visibilitychange", () => (document.visibilityState === "visible" ? poll() : clearTimeout(timer)));
byId("change-key").addEventListener("click", () => {
  if (key()) {
    sessionStorage.removeItem(KEY);
    version = "";
    poll();
  } else {
    wantsKey = !wantsKey;
    showKey();
    if (wantsKey) byId("key").focus();
  }
});
byId("key-form").addEventListener("submit", event => {
  event.preventDefault();
  try { sessionStorage.setItem(KEY, byId("key").value.trim()); } catch { return say(byId("key-problem"), "This browser does not let the page keep the key."); }
  byId("key").value = version = "";
  wantsKey = false;
  poll();
});

// ----------------------------------------------------------------------------------------------------- chat

const CHAT = "start_llm chat";
let messages = [], running = null, session = "";

function newSession() {
  session = `page-${Math.random().toString(36).slice(2, 8)}`;
  messages = [];
}

/** Keep the chat in the tab, so that it is still there after a reload. */
function keepChat() {
  try {
    if (messages.length) sessionStorage.setItem(CHAT, JSON.stringify({ session, messages, chosen }));
    else sessionStorage.removeItem(CHAT);
  } catch { /* it is full, or the browser lets the page keep nothing: a reload then loses the chat */ }
}

function restoreChat() {
  newSession();
  try {
    const kept = JSON.parse(sessionStorage.getItem(CHAT));
    if (!kept) return;
    ({ session, messages, chosen } = kept);
  } catch { return; }
  for (const one of messages) addMessage(one.role === "user" ? "You" : one.by || "Model", one.content);
  byId("log").scrollTop = byId("log").scrollHeight;
}

function addMessage(who, text) {
  const body = make("p", {}, text);
  const element = make("div", { class: "message" }, make("span", { class: "name" }, who), body);
  byId("log").append(element);
  return { element, body };
}

/** Where a reply is shown: its text, and its thoughts in a part that is folded until somebody opens it. */
function replyView(by) {
  const { element, body } = addMessage(by, "");
  const thoughts = make("p"), folded = make("details", { class: "thoughts", hidden: "" }, make("summary", {}, "Thoughts"), thoughts);
  element.insertBefore(folded, body);
  const log = byId("log");
  return delta => {
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    if (delta.reasoning_content) { folded.hidden = false; thoughts.append(delta.reasoning_content); }
    if (delta.content) body.append(delta.content);
    if (isAtEnd) log.scrollTop = log.scrollHeight;
    return body.textContent;
  };
}

async function* eventsOf(reply) {
  const decoder = new TextDecoder();
  let rest = "";
  for (let reader = reply.body.getReader(), piece; !(piece = await reader.read()).done;) {
    const parts = (rest + decoder.decode(piece.value, { stream: true })).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: {")) yield JSON.parse(part.slice(6));
  }
}

async function converse(signal) {
  const sent = messages.map(({ role, content }) => ({ role, content }));
  const body = JSON.stringify({ ...(chosen ? { model: chosen } : {}), messages: sent, stream: true });
  const reply = await checked(await fetch("/v1/chat/completions", {
    method: "POST", body, signal, headers: headers({ "Content-Type": "application/json", "x-session-id": session }),
  }));
  const by = decodeURIComponent(reply.headers.get("x-start-llm-model") ?? "") || "Model";
  const view = replyView(by), answer = { role: "assistant", content: "", by };
  messages.push(answer);
  for await (const event of eventsOf(reply)) {
    if (event.error) throw new Error(event.error.message);
    answer.content = view(event.choices?.[0]?.delta ?? {});
  }
}

async function send(question) {
  messages.push({ role: "user", content: question });
  addMessage("You", question);
  byId("question").value = "";
  keepChat();
  running = new AbortController();
  setRunning(true, "The model answers …");
  setTimeout(() => later(0), 300);
  let end = "The reply is complete.";
  try {
    await converse(running.signal);
  } catch (error) {
    end = running.signal.aborted ? "You stopped the reply." : error.message;
  }
  messages = messages.filter(one => one.role === "user" || one.content);
  keepChat();
  running = null;
  setRunning(false, end);
}

function setRunning(isRunning, text) {
  const hadFocus = document.activeElement === byId("stop");
  byId("log").setAttribute("aria-busy", String(isRunning));
  byId("send").disabled = isRunning;
  byId("stop").disabled = !isRunning;
  if (hadFocus) byId("question").focus();
  say(byId("chat-state"), text);
}

byId("chat-form").addEventListener("submit", event => {
  event.preventDefault();
  const question = byId("question").value.trim();
  if (question && !running) send(question);
});
byId("question").addEventListener("keydown", event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("chat-form").requestSubmit();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("fresh").addEventListener("click", () => {
  running?.abort();
  newSession();
  keepChat();
  byId("log").replaceChildren();
  say(byId("chat-state"), "");
  byId("question").focus();
});

byId("chat-model").addEventListener("change", () => {
  chosen = byId("chat-model").value;
  keepChat();
});
window.addEventListener("pagehide", keepChat);

restoreChat();
poll();
