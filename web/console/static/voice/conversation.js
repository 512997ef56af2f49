// The conversation: its turns, its session at the server, and the connection. Uses no element of the page.

import { FunctionCall, Question } from "./answer.js";
import { EchoDetector } from "./echo-detector.js";
import { GATEWAY_AWAY, isIdleEnd, micReason, NOTHING_RECORDED, refusedReason, serverReason, SESSION_LOST } from "./reasons.js";
import { Responses } from "./responses.js";
import { SpeechInput } from "./speech-input.js";
import { findState } from "./status.js";

const DEFAULT_RATE_HZ = 24000;
const POLICY = 1008;
const ENDED = 1000;
const CLOSING_ERRORS = ["session_idle", "session_expired"]; // the server closes after these, and the close is what is shown

/**
 * @typedef {{addTurn(turn: object): void, turnChanged(turn: object): void, removeTurn(turn: object): void,
 *   showRequest(requestId: string): void, showState(state: {state: string, label: string}): void, showReason(reason: object|null, kind?: string): void}} View
 * @typedef {{clearRefusals(): void, refuse(param: string|null, message: string): boolean, onUpdated(session: object): void}} Panel
 */
export class Conversation {
  /** @param {{model: string, socket: object, player: object|null, mic: object, recording: object, view: View, panel: Panel, settings: object}} parts */
  constructor(parts) {
    Object.assign(this, parts);
    this.status = { ended: false, refused: false, connected: false, everConnected: false, queued: 0, serverState: "" };
    this.speech = new SpeechInput(parts, this);
    this.responses = new Responses(parts, this);
    this.echo = new EchoDetector(parts);
    this.reset();
    this.socket.addEventListener("event", ({ detail }) => this.onEvent(detail));
    this.socket.addEventListener("audio", ({ detail }) => this.responses.onSamples(detail));
    this.socket.addEventListener("disconnected", ({ detail }) => this.onDisconnected(detail));
    this.socket.addEventListener("refused", ({ detail }) => this.onRefused(detail));
    this.mic.addEventListener("lost", () => this.showDeviceError(micReason({ name: "lost", message: "" })));
  }

  reset() {
    this.session = null;
    this.sessionLost = false;
    this.endedIdle = false;
    this.lastError = null;
    this.turns = [];
    /** The question that the next answer answers. */
    this.question = null;
    this.userSpeaking = false;
    this.unsent = [];
    this.numQuestions = 0;
    this.sending = Promise.resolve();
    this.echo.reset();
    this.responses.reset();
    this.speech.reset();
  }

  /** Where to connect: an answer in progress continues after what this page has received of it. */
  get url() {
    const query = new URLSearchParams();
    const answer = this.current;
    if (this.session) query.set("session", this.session);
    if (this.session && answer && !answer.done && !answer.cut) {
      query.set("response", answer.responseId);
      query.set("samples", String(answer.received));
      query.set("chars", String([...answer.text].length));
    }
    return `${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/console/ws?${query}`;
  }

  get current() {
    return this.responses.current;
  }

  onEvent(event) {
    HANDLERS[event.type]?.(this, event);
    const answer = this.responses.find(event);
    if (answer) ANSWER_HANDLERS[event.type]?.(this.responses, answer, event);
    this.refresh();
  }

  // The session

  onSession(session) {
    const lost = this.sessionLost || (this.session !== null && this.session !== session.id);
    this.sessionLost = false;
    this.responses.startConnection();
    Object.assign(this.status, { connected: true, everConnected: true, queued: 0, ended: false, refused: false });
    this.session = session.id;
    this.view.showReason(null, "connection");
    this.socket.admit();
    this.configure();
    if (lost) this.restoreHistory();
    this.socket.flush();
    for (const text of this.unsent.splice(0)) this.send(text);
  }

  /** Send the conversation as text to a server that no longer has it. */
  restoreHistory() {
    const answer = this.current;
    if (answer?.live) this.responses.fail(answer, "The connection was lost, and the server no longer had this answer.");
    this.speech.reset();
    this.socket.dropHeld((event) => "response_id" in event || "item_id" in event || event.item?.type === "function_call_output");
    for (const turn of this.turns) {
      const text = turn.role === "user" ? turn.text : turn.text.slice(0, turn.heardChars);
      if (turn.role === "tool") for (const item of turn.items) this.socket.send(created(item));
      else if (text) this.socket.send(message(turn.role, text));
    }
    this.view.showReason(SESSION_LOST, "session");
  }

  configure() {
    this.panel.clearRefusals();
    this.socket.send({ type: "session.update", session: this.sessionFields });
  }

  /** Without a player the model neither speaks nor hears. */
  get sessionFields() {
    return this.settings.session({ model: this.model, hears: this.player !== null, rateHz: this.mic.rateHz });
  }

  onError({ error }) {
    if (error.code === "response_cancel_not_active" || CLOSING_ERRORS.includes(error.code)) return;
    if (error.code === "input_audio_buffer_commit_empty" && this.firstUncommitted) {
      this.remove(this.firstUncommitted);
      this.view.showReason(NOTHING_RECORDED, "answer");
      return;
    }
    if (!this.status.connected) {
      this.lastError = error.message; // shown with the close that follows
      return;
    }
    if (this.panel.refuse(error.param ?? null, error.message)) return;
    this.view.showReason(serverReason(error), "answer");
  }

  // Spoken questions

  onSpeechStarted({ item_id, audio_start_ms }) {
    this.userSpeaking = true;
    const question = new Question("speech");
    question.maybeEcho = this.echo.onInterruption(this.current);
    this.responses.interrupt();
    this.put(Object.assign(question, { itemId: item_id, startedMs: audio_start_ms }));
  }

  onSpeechStopped({ item_id, audio_end_ms }) {
    this.userSpeaking = false;
    const question = this.findSpoken(item_id);
    if (!question) return;
    question.state = "waiting";
    question.stoppedAt = performance.now();
    question.lengthMs = audio_end_ms - (question.startedMs ?? audio_end_ms);
    this.echo.onSpeechEnd(question);
    this.view.turnChanged(question);
  }

  onCommitted({ item_id }) {
    const question = this.findSpoken(item_id) ?? this.firstUncommitted;
    if (!question) return;
    if (question.itemId === null && this.question === question) this.requestAnswer(question);
    question.itemId = item_id;
    question.committed = true;
    if (question.state === "hearing") question.state = "waiting";
    this.view.turnChanged(question);
  }

  findSpoken(itemId) {
    return this.turns.find((turn) => turn.role === "user" && turn.itemId === itemId);
  }

  /** The first push-to-talk question that the server has not confirmed. */
  get firstUncommitted() {
    return this.turns.find((turn) => turn.kind === "speech" && turn.itemId === null && turn.state === "waiting");
  }

  /** A failed transcription has neither `transcript` nor `delta`. */
  onTranscript({ item_id, transcript, delta }) {
    const question = this.findSpoken(item_id);
    if (!question) return;
    question.text = transcript ?? question.text + (delta ?? "");
    if (delta === undefined) question.state = "done";
    this.view.turnChanged(question);
  }

  onDeleted({ item_id }) {
    const question = this.findSpoken(item_id);
    if (question) this.remove(question);
  }

  /** Remove speech that the server discarded (a cough): the answer continues without it. */
  dropWithdrawnSpeech() {
    const { question } = this;
    if (question?.kind !== "speech" || question.itemId === null || question.committed || question.state === "hearing") return;
    this.remove(question);
  }

  // Typed questions

  /** @param {string} text typed */
  ask(text) {
    if (this.status.connected && !this.status.queued) return this.send(text);
    const restarted = this.restartIfEnded();
    this.unsent.push(text);
    if (!restarted) this.view.showReason({ ...GATEWAY_AWAY, text: "Your message is sent as soon as it is back." }, "connection");
  }

  /** A typed message interrupts an answer as speech does; it is sent after the truncation, so that the history is in order. */
  send(text) {
    this.stop();
    this.clearReasons();
    const question = this.number(new Question("text", text));
    this.put(question);
    this.sending = Promise.all([this.sending, this.responses.silenced]).then(() => this.submit(question));
  }

  clearReasons() {
    for (const kind of ["answer", "session"]) this.view.showReason(null, kind);
  }

  /** Give the question the number by which its answer refers to it. */
  number(question) {
    return Object.assign(question, { number: String((this.numQuestions += 1)) });
  }

  /** No answer is requested for a question that another one has followed. */
  submit(question) {
    const sent = this.socket.send(message("user", question.text));
    if (sent && this.question === question) this.requestAnswer(question);
    if (sent || !this.turns.includes(question)) return;
    this.remove(question);
    this.ask(question.text);
  }

  requestAnswer({ number }) {
    this.socket.sendOrHold({ type: "response.create", response: { metadata: { question: number } } });
  }

  // Calls of functions

  onCall(event) {
    if (!this.turns.some((turn) => turn.callId === event.call_id)) this.add(new FunctionCall(event));
  }

  /** The model is asked to continue once every call has its result. */
  sendResult(call, output) {
    Object.assign(call, { text: output, endedAt: performance.now() });
    this.socket.sendOrHold(created(call.result));
    this.view.turnChanged(call);
    if (this.turns.some((turn) => turn.role === "tool" && turn.endedAt === null)) return;
    this.question = this.number(call);
    this.requestAnswer(call);
    this.refresh();
  }

  // Turns

  /** Stop the answer, also one that has not begun: its audio here, and its computation at the server. */
  stop() {
    const answer = this.responses.interrupt();
    const active = answer && !answer.done ? { response_id: answer.responseId } : {};
    if (active.response_id || this.question !== null) this.socket.sendOrHold({ type: "response.cancel", ...active });
    if (this.question?.state !== "hearing") this.question = null;
    this.refresh();
  }

  /** @param {Question} question the one that the next answer answers */
  put(question) {
    this.question = question;
    this.add(question);
    this.refresh();
  }

  add(turn) {
    this.turns.push(turn);
    this.view.addTurn(turn);
  }

  remove(question) {
    if (this.question === question) this.question = null;
    this.turns = this.turns.filter((turn) => turn !== question);
    this.view.removeTurn(question);
  }

  // The connection

  /** Begin a new conversation. */
  restart() {
    this.stop();
    for (const turn of this.turns) this.view.removeTurn(turn);
    for (const kind of ["answer", "session", "echo"]) this.view.showReason(null, kind);
    this.reset();
    this.recording.clear();
    this.reconnect();
  }

  /** Continue, with the history as text, in a new session after the server ended the former one as idle. */
  continueAfterIdle() {
    this.stop();
    this.session = null;
    this.sessionLost = this.turns.length > 0;
    this.reconnect();
  }

  reconnect() {
    this.view.showReason(null, "connection");
    Object.assign(this.status, { ended: false, refused: false, connected: false, queued: 0 });
    this.socket.restart();
    this.refresh();
  }

  /** @returns {boolean} true if the session had ended, and another one begins */
  restartIfEnded() {
    const { ended } = this.status;
    if (ended && this.endedIdle) this.continueAfterIdle();
    else if (ended) this.restart();
    return ended;
  }

  onDisconnected({ attempt }) {
    this.status.connected = false;
    this.userSpeaking = false;
    if (attempt >= 2) this.view.showReason(GATEWAY_AWAY, "connection");
    this.refresh();
  }

  onRefused(close) {
    const { lastError } = this;
    this.lastError = null;
    this.status.connected = false;
    if (close.code === POLICY && this.session !== null) {
      // the server no longer has the session, but may accept this page without it
      Object.assign(this, { session: null, sessionLost: true });
      this.socket.connect();
      return;
    }
    this.status.ended = close.code === ENDED;
    this.endedIdle = isIdleEnd(close);
    this.status.refused = !close.again && !this.status.ended;
    if (!close.again) this.closeAudio();
    this.view.showReason(refusedReason({ ...close, reason: lastError ?? close.reason }), "connection");
    this.refresh();
  }

  closeAudio() {
    this.speech.cancel();
    this.mic.close();
    this.responses.interrupt();
  }

  showDeviceError(reason) {
    this.view.showReason(reason, "device");
    this.refresh();
  }

  refresh() {
    const answer = this.current;
    const asked = this.question !== null && this.question.state !== "hearing";
    const unfinished = Boolean(answer && !answer.done && !answer.cut);
    this.view.showState(
      findState({
        ...this.status,
        interrupted: performance.now() < this.responses.interruptedUntil,
        hearing: this.userSpeaking || this.speech.pressedAt !== null,
        playing: this.player?.playing ?? false,
        thinking: unfinished || asked || this.status.serverState === "thinking",
        opening: this.mic.opening,
        mic: this.mic.on,
        muted: this.mic.muted,
        pushToTalk: this.settings.pushToTalk,
      }),
    );
  }
}

function created(item) {
  return { type: "conversation.item.create", item };
}

function message(role, text) {
  return created({ type: "message", role, content: [{ type: role === "user" ? "input_text" : "output_text", text }] });
}

const onTranscript = (conversation, event) => conversation.onTranscript(event);

const HANDLERS = {
  "session.created": (conversation, { session }) => conversation.onSession(session),
  "session.updated": ({ panel }, { session }) => panel.onUpdated(session),
  "fleet.queue": ({ status }, { position }) => Object.assign(status, { connected: true, queued: position }),
  "fleet.state": ({ status }, { state }) => Object.assign(status, { serverState: state }),
  "fleet.resumed": ({ responses }, event) => responses.onResumed(event),
  error: (conversation, event) => conversation.onError(event),
  "input_audio_buffer.speech_started": (conversation, event) => conversation.onSpeechStarted(event),
  "input_audio_buffer.speech_stopped": (conversation, event) => conversation.onSpeechStopped(event),
  "input_audio_buffer.committed": (conversation, event) => conversation.onCommitted(event),
  "conversation.item.input_audio_transcription.delta": onTranscript,
  "conversation.item.input_audio_transcription.completed": onTranscript,
  "conversation.item.input_audio_transcription.failed": onTranscript,
  "conversation.item.deleted": (conversation, event) => conversation.onDeleted(event),
  "conversation.item.truncated": ({ responses }, event) => responses.onTruncated(event),
  "conversation.item.retrieved": ({ responses }, event) => responses.onRetrieved(event),
  "response.created": ({ responses, player }, event) => responses.onCreated(event, player?.rateHz || DEFAULT_RATE_HZ),
  "fleet.request": ({ view }, { request_id }) => view.showRequest(request_id),
};

const onText = (responses, answer, event) => responses.onText(answer, event);

/** Handlers of events about a known answer. */
const ANSWER_HANDLERS = {
  "response.output_item.added": (_responses, answer, { item }) => item.type !== "function_call" && Object.assign(answer, { itemId: item.id }),
  "response.function_call_arguments.done": ({ conversation }, _answer, event) => conversation.onCall(event),
  "response.output_audio_transcript.delta": onText,
  "response.output_audio_transcript.done": onText,
  "response.output_text.delta": onText,
  "response.output_text.done": onText,
  "response.output_audio.done": (responses, answer) => responses.onAudioDone(answer),
  "response.done": (responses, answer, { response }) => responses.onDone(answer, response),
  "fleet.request": (_responses, answer, { request_id }) => Object.assign(answer, { requestId: request_id }),
  // a serial belongs to one connection: after a reconnect the same answer may have another
  "fleet.audio": (_responses, answer, { serial, item_id }) => Object.assign(answer, { streamSerial: serial, itemId: item_id }),
  "fleet.voiced": (responses, answer, event) => responses.onVoiced(answer, event),
  "fleet.words": (_responses, answer, { ends }) => answer.addWords(ends),
  "fleet.timing": (responses, answer, event) => responses.onTiming(answer, event),
};
