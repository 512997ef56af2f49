// The element of one turn: its text, the part that was heard, its notes and its latency; for a call of a function, its result.

const $template = (id) => document.getElementById(id).content.firstElementChild;

export class TurnView {
  /**
   * @param {object} turn a Question, an Answer or a FunctionCall @param {Map<string, number>} colours of the stages
   * @param {(call: object, output: string) => void} onResult
   */
  constructor(turn, colours, onResult) {
    this.turn = turn;
    this.colours = colours;
    this.element = $template(turn.role === "tool" ? "call-template" : "turn-template").cloneNode(true);
    this.element.classList.add(turn.role);
    if (turn.role === "tool") this.showCall(turn, onResult);
    this.shownLatency = null;
    this.update();
  }

  find(selector) {
    return this.element.querySelector(selector);
  }

  update() {
    if (this.turn.role === "user") this.updateQuestion(this.turn);
    else if (this.turn.role === "tool") this.updateCall(this.turn);
    else this.updateAnswer(this.turn);
  }

  showCall(call, onResult) {
    this.find(".name").textContent = call.name;
    this.find(".arguments").textContent = call.arguments;
    this.find("form").addEventListener("submit", (event) => {
      event.preventDefault();
      onResult(call, this.find("textarea").value);
    });
  }

  updateCall({ text, endedAt }) {
    this.find("form").hidden = endedAt !== null;
    setText(this.find(".words"), text);
  }

  updateQuestion({ kind, text, state, lengthMs }) {
    const spoken = kind === "speech";
    const missing = state === "hearing" ? "…" : `spoken${lengthMs ? `, ${(lengthMs / 1000).toFixed(1)} s` : ""}`;
    this.showText(text || (spoken ? missing : ""), "", "");
    this.element.classList.toggle("wordless", spoken && !text);
    this.element.classList.toggle("open", state === "hearing");
  }

  updateAnswer(answer) {
    const { text, cut, live, failure, done } = answer;
    const heard = answer.heardChars;
    const rest = text.slice(heard);
    this.showText(text.slice(0, heard), cut ? "" : rest, cut ? rest : "");
    this.element.classList.toggle("open", live && !done);
    this.element.classList.toggle("cut-off", cut);
    this.element.classList.toggle("failed", Boolean(failure));
    this.find(".notes").textContent = listNotes(answer).join(" · ");
    if (answer.latency !== this.shownLatency) this.showLatency(answer);
    if (answer.requestId) this.link(answer.requestId);
  }

  showText(heard, ahead, cut) {
    setText(this.find(".heard"), heard);
    setText(this.find(".ahead"), ahead);
    setText(this.find(".cut"), cut);
  }

  link(requestId) {
    for (const link of this.element.querySelectorAll(".request")) link.href = `/requests/${encodeURIComponent(requestId)}`;
    this.find(".open-request").hidden = false;
  }

  showLatency({ latency, spoken }) {
    this.shownLatency = latency;
    const total = Math.round(latency.totalMs);
    const parts = latency.parts.map(({ name, ms }) => `${name} ${Math.round(ms)} ms`).join(", ");
    const box = this.find(".latency");
    box.hidden = false;
    box.setAttribute("aria-label", `${spoken ? "Voice to voice" : "To first audio"} ${total} ms: ${parts}`);
    this.find(".total").textContent = `${total} ms`;
    this.find(".what").textContent = spoken ? "voice to voice" : "to first audio";
    this.find(".bar").replaceChildren(...latency.parts.filter(({ ms }) => ms > 0).map((part) => this.createBar(part)));
    this.find(".legend").replaceChildren(...latency.parts.map((part) => this.createLabel(part)));
  }

  createBar(part) {
    const bar = document.createElement("span");
    bar.className = this.classOf(part.name);
    bar.style.flexGrow = String(part.ms);
    return bar;
  }

  createLabel(part) {
    const label = $template("part-template").cloneNode(true);
    label.className = this.classOf(part.name);
    label.querySelector(".name").textContent = part.name;
    label.querySelector(".ms").textContent = String(Math.round(part.ms));
    return label;
  }

  classOf(name) {
    const colour = this.colours.get(name);
    return colour === undefined ? `part part-${name}` : `part colour-${colour}`;
  }
}

function listNotes({ notes, underruns, failure, firstTextMs, audible, cut, playedMs }) {
  const shown = [];
  if (!audible && firstTextMs) shown.push(`first text ${Math.round(firstTextMs)} ms`);
  shown.push(...notes);
  if (cut && audible) shown.push(`${(playedMs / 1000).toFixed(1)} s heard`);
  if (underruns > 0) shown.push(`${underruns} gap${underruns > 1 ? "s" : ""}`);
  if (failure) shown.push(failure);
  return shown;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
