// The talk: one socket, one answer at a time. The strip above is htmx's.
import { Player } from "./player.js";

const MAX_HISTORY = 40;
const RECONNECT_MS = [250, 500, 1000, 2000, 4000];
const $ = (id) => document.getElementById(id);
const { page, model, rateHz, worklet } = document.body.dataset;

class Talk {
  constructor() {
    this.player = Number(rateHz) > 0 ? new Player(Number(rateHz), worklet) : null;
    this.history = [];
    this.answer = null;
    this.listening = false;
    this.attempt = 0;
    this.reported = 0;
    this.stopping = 0;
    this.queued = null;
    this.opening = null;
    this.empty = $("empty");
    this.player?.addEventListener("heard", () => this.onHeard());
    this.connect();
  }

  connect() {
    const scheme = location.protocol === "https:" ? "wss" : "ws";
    this.socket = new WebSocket(`${scheme}://${location.host}/console/ws?page=${encodeURIComponent(page)}`);
    this.socket.binaryType = "arraybuffer";
    this.socket.onopen = () => {
      this.attempt = 0;
      this.stopping = 0;
      this.setLink("connected", "ok");
      if (this.answer) this.resume();
      const queued = this.queued;
      this.queued = null;
      if (queued) this.send(...queued);
    };
    this.socket.onmessage = ({ data }) => (typeof data === "string" ? this.onMessage(JSON.parse(data)) : this.onSound(data));
    this.socket.onclose = () => this.onClose();
  }

  onClose() {
    if (this.answer && !this.answer.id) this.fail("The connection to the gateway was lost before the answer began. Ask again.");
    if (this.answer) this.note("connection lost, going on as soon as a gateway is back");
    const wait = RECONNECT_MS[Math.min(this.attempt, RECONNECT_MS.length - 1)];
    this.attempt += 1;
    this.setLink("gateway away, trying again", "bad");
    setTimeout(() => this.connect(), wait);
  }

  // The answer goes on where this page has it, whichever gateway answers now.
  resume() {
    const { id, text, samples } = this.answer;
    this.socket.send(JSON.stringify({ type: "resume", request_id: id, chars: [...text].length, samples }));
  }

  setLink(text, kind) {
    $("link").textContent = text;
    $("link").className = `link ${kind}`;
  }

  ask(text) {
    const voice = $("voice")?.value ?? "";
    // Here and not later: browsers allow sound only while they handle the key press.
    this.opening = voice ? this.player.open().catch((error) => error) : null;
    if (this.socket.readyState === WebSocket.OPEN) return this.send(text, voice);
    this.queued = [text, voice];
    this.showError("The gateway is away; your message is sent as soon as it is back.");
  }

  async send(text, voice) {
    this.interrupt();
    this.showError("");
    this.history.push({ role: "user", content: text });
    this.history = this.history.slice(-MAX_HISTORY);
    this.addTurn("user", text);
    this.answer = { turn: this.addTurn("assistant", ""), text: "", id: null, samples: 0, askedAt: performance.now(), notes: [], begun: new Set() };
    this.setBusy(true);
    this.socket.send(JSON.stringify({ type: "ask", body: this.body(voice) }));
    const error = await this.opening;
    if (error) this.showError(error.message);
  }

  body(voice) {
    const body = { model, messages: this.history, stream: true, prompt_cache_key: page };
    return voice ? { ...body, modalities: ["text", "audio"], audio: { voice, format: "pcm16" } } : body;
  }

  interrupt() {
    this.listening = false;
    this.player?.flush();
    if (!this.answer || this.socket.readyState !== WebSocket.OPEN) return;
    this.stopping += 1;
    this.socket.send(JSON.stringify({ type: "stop" }));
    this.note("stopped");
    this.finish();
  }

  onMessage(message) {
    // Whatever comes before the gateway says "stopped" is still the old answer's.
    if (message.type === "stopped") this.stopping -= 1;
    if (this.stopping > 0 || message.type === "stopped") return;
    if (message.type === "error") return this.fail(message.error.message);
    if (!this.answer) return;
    if (message.type === "started") {
      this.listening = true;
      this.answer.id = message.request_id;
    } else if (message.type === "text" && this.listening) {
      this.noteFirst("text");
      this.answer.text += message.text;
      this.answer.turn.querySelector(".words").textContent = this.answer.text;
      this.scroll();
    } else if (message.type === "end" && this.listening) {
      this.onEnd(message);
    }
  }

  onSound(data) {
    if (!this.listening) return;
    this.noteFirst("sound");
    this.answer.samples += data.byteLength / 2;
    this.player?.push(data);
  }

  onEnd(message) {
    this.player?.end();
    const seconds = Number(rateHz) > 0 ? message.num_samples / Number(rateHz) : 0;
    this.note(`${message.text_tokens} tokens`);
    if (seconds > 0) this.note(`${seconds.toFixed(1)} s of speech`);
    if (message.finish_reason === "length") this.note("cut at the length limit");
    this.finish();
  }

  finish() {
    this.listening = false;
    if (this.answer.text) this.history.push({ role: "assistant", content: this.answer.text });
    this.answer = null;
    this.setBusy(false);
  }

  fail(text) {
    this.showError(text);
    this.player?.flush();
    if (!this.answer) return;
    if (!this.answer.text) this.answer.turn.remove();
    this.note("failed");
    this.finish();
  }

  noteFirst(what) {
    if (this.answer.begun.has(what)) return;
    this.answer.begun.add(what);
    this.note(`first ${what} ${Math.round(performance.now() - this.answer.askedAt)} ms`);
  }

  note(text) {
    this.answer.notes.push(text);
    this.answer.turn.querySelector(".notes").textContent = this.answer.notes.join(" · ");
  }

  addTurn(role, text) {
    this.empty.remove();
    const turn = document.createElement("article");
    turn.className = `turn ${role}`;
    turn.innerHTML = '<p class="words"></p><p class="notes num"></p>';
    turn.querySelector(".words").textContent = text;
    $("talk").append(turn);
    this.scroll();
    return turn;
  }

  scroll() {
    const talk = $("talk").parentElement;
    talk.scrollTop = talk.scrollHeight;
  }

  setBusy(busy) {
    $("stop").hidden = !busy;
    $("send").hidden = busy;
    document.body.classList.toggle("answering", busy);
  }

  showError(text) {
    $("error").textContent = text;
    $("error").hidden = !text;
  }

  clear() {
    this.interrupt();
    this.history = [];
    this.showError("");
    $("talk").replaceChildren(this.empty);
    $("message").focus();
  }

  onHeard() {
    $("played").textContent = `played ${this.player.playedS.toFixed(1)} s`;
    $("played").classList.toggle("playing", this.player.playing);
    // The button stays while sound is left to stop.
    if (!this.answer) {
      $("stop").hidden = !this.player.playing;
      $("send").hidden = this.player.playing;
    }
    const { played, underruns } = this.player;
    if (underruns > this.reported && this.socket.readyState === WebSocket.OPEN) {
      this.socket.send(JSON.stringify({ type: "played", samples: played, underruns: underruns - this.reported }));
      this.reported = underruns;
    }
  }
}

const talk = new Talk();
window.fleetPlayer = talk.player;

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("message").value.trim();
  if (!text) return;
  $("message").value = "";
  talk.ask(text);
});
$("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
});
$("empty").addEventListener("click", ({ target }) => {
  if (target.matches(".example")) talk.ask(target.textContent);
});
$("stop").addEventListener("click", () => {
  talk.interrupt();
  talk.setBusy(false);
});
$("clear").addEventListener("click", () => talk.clear());
