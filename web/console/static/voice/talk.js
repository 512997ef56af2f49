// The conversation: what the server says, what is played and what is said, tied together. Knows no element of the page.

import { Answer, Question } from "./answer.js";
import { latencyOf } from "./latency.js";
import { ECHO_HEARD, GATEWAY_AWAY, isIdleEnd, micReason, NOTHING_HEARD, refusedReason, serverReason, SESSION_LOST } from "./reasons.js";
import { Speech } from "./speech.js";
import { stateOf } from "./status.js";

const PLAYED_EVERY_MS = 250;
const INTERRUPTED_SHOWN_MS = 1200;
const ECHO_WINDOW_MS = 500; // from the first voiced sample that was heard
const ECHOES_SHOWN = 2;
const ECHO_FREE_MS = 1500; // of an answer's voice without an interruption: longer than an echo takes to be noticed
const ECHO_LENGTH_MS = 1200; // of a turn, with the silence around it: an echo ends with the sound it comes from
const DEFAULT_RATE_HZ = 24000;
const SETTLE_MS = 1000;
const MAX_ENDPOINTING_MS = 5000;
const QUIET_WITHIN_MS = 300;
const POLICY = 1008;
const ENDED = 1000;
const ENDING = ["session_idle", "session_expired"]; // errors after which the server closes: what follows is shown then

/**
 * @typedef {{addTurn(turn: object): void, turnChanged(turn: object): void, removeTurn(turn: object): void,
 *   showRequest(requestId: string): void, showState(state: {state: string, words: string}): void, showReason(reason: object|null, kind?: string): void}} View
 */
export class Talk {
  /** @param {{model: string, socket: object, player: object|null, mic: object, recording: object, view: View, settings: object}} parts */
  constructor(parts) {
    Object.assign(this, parts);
    this.speech = new Speech(parts, this);
    this.begin();
    this.facts = { ended: false, refused: false, connected: false, everConnected: false, queued: 0, serverState: "" };
    this.lastSerial = 0;
    this.lastPlayedSent = 0;
    this.listen();
  }

  begin() {
    this.session = null;
    this.forgotten = false;
    this.idleEnd = false;
    this.trouble = null;
    this.turns = [];
    this.answers = new Map();
    this.question = null;
    this.hearing = false;
    this.echoes = 0;
    this.interruptedUntil = 0;
    this.waiting = [];
    this.numAsked = 0;
    this.quiet = this.sending = Promise.resolve();
    this.speech.begin();
  }

  listen() {
    this.socket.addEventListener("event", ({ detail }) => this.onEvent(detail));
    this.socket.addEventListener("sound", ({ detail }) => this.onSound(detail));
    this.socket.addEventListener("down", ({ detail }) => this.onDown(detail));
    this.socket.addEventListener("refused", ({ detail }) => this.onRefused(detail));
    this.mic.addEventListener("lost", () => this.fail(micReason({ name: "lost", message: "" })));
    this.player?.addEventListener("heard", ({ detail }) => this.onHeard(detail));
  }

  /** Where to connect: an answer under way goes on behind what this page has of it. */
  address() {
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
    return [...this.answers.values()].at(-1) ?? null;
  }

  // What the server says

  onEvent(event) {
    const handler = HANDLERS[event.type];
    if (handler) handler.call(this, event);
    this.refresh();
  }

  onSession(session) {
    const lost = this.forgotten || (this.session !== null && this.session !== session.id);
    this.forgotten = false;
    for (const answer of this.answers.values()) answer.wireSerial = 0;
    Object.assign(this.facts, { connected: true, everConnected: true, queued: 0, ended: false, refused: false });
    this.session = session.id;
    this.view.showReason(null, "connection");
    this.socket.admit();
    this.configure();
    if (lost) this.tellAgain();
    this.socket.flush();
    for (const text of this.waiting.splice(0)) this.send(text);
  }

  /** What was told while nobody listened has come by itself; of what was lost on the way only this is known. */
  onResumed({ response_id, transcript }) {
    for (const answer of this.answers.values()) {
      if (answer.responseId !== response_id) this.settle(answer, -1);
      else if (transcript) this.onText(answer, { transcript });
    }
  }

  /** The server has ended it already: once no more of its sound comes, it is over here too. */
  settle(answer, received) {
    if (answer.done || answer.cut || !this.facts.connected) return;
    if (answer.received === received) this.onDone({ response: { id: answer.responseId, status: "completed" } });
    else setTimeout(() => this.settle(answer, answer.received), SETTLE_MS);
  }

  /** The server has forgotten this conversation: it is told what was said, as text. */
  tellAgain() {
    const answer = this.current;
    if (answer?.live) this.endAnswer(answer, "The connection was lost, and the server no longer had this answer.");
    this.speech.begin();
    this.socket.dropHeld((event) => "response_id" in event || "item_id" in event);
    for (const turn of this.turns) {
      const text = turn.role === "user" ? turn.text : turn.text.slice(0, turn.heardChars);
      if (text) this.socket.send(message(turn.role, text));
    }
    this.view.showReason(SESSION_LOST, "session");
  }

  configure() {
    const { voice, walkie } = this.settings;
    this.socket.send({
      type: "session.update",
      session: {
        type: "realtime",
        output_modalities: [voice ? "audio" : "text"],
        audio: {
          input: {
            format: { type: "audio/pcm", rate: this.mic.rateHz || DEFAULT_RATE_HZ },
            transcription: { model: this.model },
            turn_detection: walkie ? null : { type: "server_vad" },
          },
          ...(voice ? { output: { voice } } : {}),
        },
      },
    });
  }

  onSpeechStarted({ item_id, audio_start_ms }) {
    this.hearing = true;
    const question = new Question("speech");
    question.echo = this.noteEcho();
    this.silence();
    this.put(Object.assign(question, { itemId: item_id, startedMs: audio_start_ms }));
  }

  /** Interrupted twice as soon as its voice was heard: it probably hears itself. Returns whether this may be its echo. */
  noteEcho() {
    const answer = this.current;
    if (!answer?.live || answer.audibleAt === null || answer.voiced === null) return false;
    const sinceVoiced = performance.now() - (answer.audibleAt + answer.silenceMs);
    if (sinceVoiced < 0 || sinceVoiced >= ECHO_WINDOW_MS) return false;
    this.echoes += 1;
    if (this.echoes === ECHOES_SHOWN && !this.settings.walkie) this.view.showReason(ECHO_HEARD, "echo");
    return true;
  }

  /** A voice that continues after the answer fell silent was a person's. */
  noteNoEcho(question) {
    if (!question.echo || question.lengthMs < ECHO_LENGTH_MS) return;
    question.echo = false;
    this.echoes -= 1;
    if (this.echoes < ECHOES_SHOWN) this.view.showReason(null, "echo");
  }

  /** An answer that is heard by an open microphone for a while and not interrupted: earlier interruptions were no echo. */
  noteUndisturbed(answer, ended) {
    const { mic, settings } = this;
    if (this.echoes === 0 || settings.walkie || !mic.on || mic.muted) return;
    if (answer.cut || this.hearing || answer.audibleAt === null || answer.voiced === null) return;
    const sinceVoiced = performance.now() - (answer.audibleAt + answer.silenceMs);
    if (sinceVoiced < (ended ? ECHO_WINDOW_MS : ECHO_FREE_MS)) return;
    this.echoes = 0;
    this.view.showReason(null, "echo");
  }

  onSpeechStopped({ item_id, audio_end_ms }) {
    this.hearing = false;
    const question = this.spoken(item_id);
    if (!question) return;
    question.state = "waiting";
    question.stoppedAt = performance.now();
    question.lengthMs = audio_end_ms - (question.startedMs ?? audio_end_ms);
    this.noteNoEcho(question);
    this.view.turnChanged(question);
  }

  onCommitted({ item_id }) {
    const question = this.spoken(item_id) ?? this.uncommitted;
    if (!question) return;
    if (question.itemId === null && this.question === question) this.askFor(question);
    question.itemId = item_id;
    question.committed = true;
    if (question.state === "hearing") question.state = "waiting";
    this.view.turnChanged(question);
  }

  spoken(itemId) {
    return this.turns.find((turn) => turn.role === "user" && turn.itemId === itemId);
  }

  /** What was said first of that of which the server has not told that it has it: sound that was pushed to talk. */
  get uncommitted() {
    return this.turns.find((turn) => turn.kind === "speech" && turn.itemId === null && turn.state === "waiting");
  }

  onTranscript({ item_id, transcript, delta }) {
    const question = this.spoken(item_id);
    if (!question) return;
    question.text = transcript ?? question.text + delta;
    if (transcript !== undefined) question.state = "done";
    this.view.turnChanged(question);
  }

  onNoTranscript({ item_id }) {
    const question = this.spoken(item_id);
    if (!question) return;
    question.state = "done";
    this.view.turnChanged(question);
  }

  onDeleted({ item_id }) {
    const question = this.spoken(item_id);
    if (question) this.takeBack(question);
  }

  // An answer

  onCreated({ response }) {
    if (this.answers.has(response.id)) return;
    this.dropUnsaid();
    this.lastSerial += 1;
    const answer = new Answer(response.id, this.lastSerial, this.player?.rateHz || DEFAULT_RATE_HZ);
    if (response.metadata?.question === this.question?.number) {
      answer.question = this.question;
      this.question = null;
    } else {
      answer.cut = true; // another question has been asked meanwhile
    }
    this.answers.set(response.id, answer);
    this.add(answer);
  }

  /** Speech that was taken back (a cough) is no turn: the answer goes on without it. */
  dropUnsaid() {
    const question = this.question;
    if (question?.kind !== "speech" || question.itemId === null || question.committed || question.state === "hearing") return;
    this.takeBack(question);
  }

  of(event) {
    return this.answers.get(event.response_id ?? event.response?.id);
  }

  onText(answer, { delta, transcript, text }) {
    if (!answer) return;
    const whole = transcript ?? text;
    if (answer.text === "" && answer.question && answer.firstTextMs === undefined) answer.firstTextMs = this.sinceAsked(answer);
    answer.text = whole === undefined ? answer.text + delta : whole || answer.text;
    this.view.turnChanged(answer);
  }

  sinceAsked(answer) {
    const { endedAt } = answer.question;
    return endedAt === null ? null : performance.now() - endedAt;
  }

  /** Numbers of the server's are its connection's own: after a reconnect the same answer may have another. */
  onAudio({ serial, response_id, item_id }) {
    const answer = this.answers.get(response_id);
    if (answer) Object.assign(answer, { wireSerial: serial, itemId: item_id });
  }

  onSound({ serial, offset, pcm }) {
    const answer = [...this.answers.values()].findLast((known) => known.wireSerial === serial);
    if (!answer || answer.cut) return;
    const fresh = answer.accept(offset, pcm);
    if (fresh.length === 0) return;
    this.recording.answerPiece(answer, fresh);
    this.player?.push(answer.serial, fresh);
  }

  onAudioDone(answer) {
    if (!answer || answer.audioDone) return;
    answer.audioDone = true;
    if (!answer.cut) this.player?.end(answer.serial);
  }

  onDone({ response }) {
    const answer = this.answers.get(response.id);
    if (!answer || answer.done) return;
    answer.done = true;
    this.facts.serverState = "";
    if (answer.audible) this.onAudioDone(answer);
    const { status, status_details: details } = response;
    if (status === "failed") this.endAnswer(answer, serverReason(details?.error).text);
    if (status === "incomplete") answer.notes.push("cut at the length limit");
    const tokens = response.usage?.output_token_details?.text_tokens;
    if (tokens) answer.notes.push(`${tokens} tokens`);
    if (answer.audible && status === "completed") answer.notes.push(`${(answer.received / answer.rateHz).toFixed(1)} s of speech`);
    this.view.turnChanged(answer);
  }

  endAnswer(answer, why) {
    answer.failure = why;
    answer.done = true;
    if (!answer.audioDone) this.player?.end(answer.serial);
    this.view.turnChanged(answer);
    this.view.showReason({ title: "The answer failed", text: why }, "answer");
  }

  onTruncated({ item_id }) {
    this.socket.send({ type: "conversation.item.retrieve", item_id });
  }

  /** What the history holds of an answer that was cut off: that is what was heard. */
  onRetrieved({ item }) {
    const answer = this.turns.find((turn) => turn.role === "assistant" && turn.itemId === item.id);
    const part = item.content?.find((known) => typeof (known.transcript ?? known.text) === "string");
    if (!answer || !part) return;
    answer.kept = part.transcript ?? part.text;
    this.view.turnChanged(answer);
  }

  onTiming(event) {
    const answer = this.of(event);
    if (!answer) return;
    answer.timing = event;
    answer.requestId ??= event.request_id;
    this.noteLatency(answer);
  }

  noteLatency(answer) {
    const { timing, firstSoundAt, audibleAt, silenceMs, question } = answer;
    if (!timing || audibleAt === null || firstSoundAt === null || silenceMs === null || answer.latency) return;
    answer.spoken = question?.kind === "speech" && timing.voice_to_voice_ms !== null;
    answer.latency = latencyOf({ endedAt: this.endOf(question, timing), firstSoundAt, audibleAt, silenceMs, timing });
    this.view.turnChanged(answer);
  }

  /** The server names the end of speech as a place in the sound it was sent; another gateway may count from elsewhere. */
  endOf(question, timing) {
    const endedAt = question?.endedAt ?? null;
    if (question?.kind !== "speech") return endedAt;
    const ms = timing.voiced_end_ms ?? null;
    const at = ms === null ? null : this.speech.sent.when(ms);
    const waited = (question.stoppedAt ?? endedAt) - at;
    return at !== null && waited >= 0 && waited < MAX_ENDPOINTING_MS ? at : endedAt;
  }

  onError({ error }) {
    if (error.code === "response_cancel_not_active" || ENDING.includes(error.code)) return;
    if (error.code === "input_audio_buffer_commit_empty" && this.uncommitted) {
      this.takeBack(this.uncommitted);
      this.view.showReason(NOTHING_HEARD, "answer");
      return;
    }
    if (!this.facts.connected) {
      this.trouble = error.message; // the close that follows says what comes of it
      return;
    }
    this.view.showReason(serverReason(error), "answer");
  }

  // What is heard

  onHeard(heard) {
    const answer = [...this.answers.values()].find((known) => known.serial === heard.serial);
    if (answer) this.noteHeard(answer, heard);
    this.refresh();
  }

  noteHeard(answer, heard) {
    if (heard.kind === "started") {
      answer.audibleAt ??= heard.at;
      this.recording.answerRun(answer, heard.played, heard.at);
      this.noteLatency(answer);
    }
    Object.assign(answer, { played: heard.played, underruns: heard.underruns });
    this.noteUndisturbed(answer, heard.kind === "ended");
    if (heard.kind !== "started" && heard.kind !== "report") this.recording.answerRunEnds(answer, heard.played);
    if (heard.kind !== "report" || performance.now() - this.lastPlayedSent >= PLAYED_EVERY_MS) this.tellPlayed(answer, heard);
    this.view.turnChanged(answer);
  }

  /** Underruns are those since it was last said. */
  tellPlayed(answer, heard) {
    const buffer_ms = Math.round((1000 * heard.buffered) / answer.rateHz);
    const { responseId: response_id, played: samples } = answer;
    const underruns = answer.underruns - answer.toldUnderruns;
    if (!this.socket.send({ type: "fleet.played", response_id, samples, underruns, buffer_ms })) return;
    answer.toldUnderruns = answer.underruns;
    this.lastPlayedSent = performance.now();
  }

  /**
   * Quiet at once; the server learns where, and cuts the history there: `quiet` is when it was told. Returns the answer that was cut
   * off, if any.
   */
  silence() {
    const answer = [...this.answers.values()].findLast((known) => known.live);
    if (!answer) return null;
    answer.cut = true;
    this.interruptedUntil = performance.now() + INTERRUPTED_SHOWN_MS;
    setTimeout(() => this.refresh(), INTERRUPTED_SHOWN_MS + 20);
    this.quiet = Promise.race([this.quieten(answer), pause(QUIET_WITHIN_MS)]);
    return answer;
  }

  async quieten(answer) {
    await this.player?.flush(answer.serial);
    answer.notes.push("interrupted");
    if (answer.itemId && answer.audible && this.turns.includes(answer)) {
      const { itemId: item_id, playedMs: audio_end_ms } = answer;
      this.socket.keep({ type: "conversation.item.truncate", item_id, content_index: 0, audio_end_ms });
    }
    this.view.turnChanged(answer);
    this.refresh();
  }

  // What is said

  /** @param {string} text typed */
  ask(text) {
    if (this.facts.connected && !this.facts.queued) return this.send(text);
    const again = this.restartIfEnded();
    this.waiting.push(text);
    if (!again) this.view.showReason({ ...GATEWAY_AWAY, text: "Your message is sent as soon as it is back." }, "connection");
  }

  /** What is typed interrupts an answer as speech does: it ends, history keeps what was heard of it, and then comes the question. */
  send(text) {
    this.stop();
    this.forgetReasons();
    const question = this.numbered(new Question("text", text));
    this.put(question);
    this.sending = Promise.all([this.sending, this.quiet]).then(() => this.tell(question));
  }

  forgetReasons() {
    for (const kind of ["answer", "session"]) this.view.showReason(null, kind);
  }

  /** Its answer names it. */
  numbered(question) {
    return Object.assign(question, { number: String((this.numAsked += 1)) });
  }

  /** One that something was said after already is not answered by itself. */
  tell(question) {
    const told = this.socket.send(message("user", question.text));
    if (told && this.question === question) this.askFor(question);
    if (told || !this.turns.includes(question)) return;
    this.takeBack(question);
    this.ask(question.text);
  }

  askFor({ number }) {
    this.socket.send({ type: "response.create", response: { metadata: { question: number } } });
  }

  /** Stop the answer, or the one that is about to begin: its sound here, and the work for it there. None is waited for any more. */
  stop() {
    const answer = this.silence();
    const begun = answer && !answer.done ? { response_id: answer.responseId } : {};
    if (begun.response_id || this.question !== null) this.socket.keep({ type: "response.cancel", ...begun });
    if (this.question?.state !== "hearing") this.question = null;
    this.refresh();
  }

  /** @param {Question} question the one that the next answer answers */
  put(question) {
    this.question = question;
    this.add(question);
    this.refresh();
  }

  takeBack(question) {
    if (this.question === question) this.question = null;
    this.turns = this.turns.filter((turn) => turn !== question);
    this.view.removeTurn(question);
  }

  /** A new conversation. */
  restart() {
    this.stop();
    for (const turn of this.turns) this.view.removeTurn(turn);
    for (const kind of ["answer", "session", "echo"]) this.view.showReason(null, kind);
    this.begin();
    this.recording.clear();
    this.connectAgain();
  }

  /** The conversation goes to a new session as text: the server ended the former one as idle. */
  continueAfterIdle() {
    this.stop();
    this.session = null;
    this.forgotten = this.turns.length > 0;
    this.connectAgain();
  }

  connectAgain() {
    this.view.showReason(null, "connection");
    Object.assign(this.facts, { ended: false, refused: false, connected: false, queued: 0 });
    this.socket.restart();
    this.refresh();
  }

  /** @returns {boolean} true if the session was over, and another one begins */
  restartIfEnded() {
    const { ended } = this.facts;
    if (ended && this.idleEnd) this.continueAfterIdle();
    else if (ended) this.restart();
    return ended;
  }

  // The connection

  onDown({ attempt }) {
    this.facts.connected = false;
    this.hearing = false;
    if (attempt >= 2) this.view.showReason(GATEWAY_AWAY, "connection");
    this.refresh();
  }

  onRefused(close) {
    const { trouble } = this;
    this.trouble = null;
    this.facts.connected = false;
    if (close.code === POLICY && this.session !== null) return this.beginAnew();
    this.facts.ended = close.code === ENDED;
    this.idleEnd = isIdleEnd(close);
    this.facts.refused = !close.again && !this.facts.ended;
    if (!close.again) this.hangUp();
    this.view.showReason(refusedReason({ ...close, reason: trouble ?? close.reason }), "connection");
    this.refresh();
  }

  /** Nothing is sent or played any more: the microphone closes. */
  hangUp() {
    this.speech.drop();
    this.mic.close();
    this.silence();
  }

  /** There is no such session any more; without one the server may well take this page. */
  beginAnew() {
    this.session = null;
    this.forgotten = true;
    this.socket.connect();
  }

  fail(reason) {
    this.view.showReason(reason, "device");
    this.refresh();
  }

  add(turn) {
    this.turns.push(turn);
    this.view.addTurn(turn);
  }

  refresh() {
    const answer = this.current;
    const asked = this.question !== null && this.question.state !== "hearing";
    const owed = Boolean(answer && !answer.done && !answer.cut);
    this.view.showState(
      stateOf({
        ...this.facts,
        interrupted: performance.now() < this.interruptedUntil,
        hearing: this.hearing || this.speech.pressedAt !== null,
        playing: this.player?.playing ?? false,
        thinking: owed || asked || this.facts.serverState === "thinking",
        opening: this.mic.opening,
        mic: this.mic.on,
        muted: this.mic.muted,
        walkie: this.settings.walkie,
      }),
    );
  }
}

function pause(ms) {
  return new Promise((resolve) => setTimeout(resolve, ms));
}

function message(role, text) {
  const type = role === "user" ? "input_text" : "output_text";
  return { type: "conversation.item.create", item: { type: "message", role, content: [{ type, text }] } };
}

const HANDLERS = {
  "session.created"({ session }) {
    this.onSession(session);
  },
  "fleet.queue"({ position }) {
    this.facts.connected = true;
    this.facts.queued = position;
  },
  "fleet.state"({ state }) {
    this.facts.serverState = state;
  },
  "input_audio_buffer.speech_started": Talk.prototype.onSpeechStarted,
  "input_audio_buffer.speech_stopped": Talk.prototype.onSpeechStopped,
  "input_audio_buffer.committed": Talk.prototype.onCommitted,
  "conversation.item.input_audio_transcription.delta": Talk.prototype.onTranscript,
  "conversation.item.input_audio_transcription.completed": Talk.prototype.onTranscript,
  "conversation.item.input_audio_transcription.failed": Talk.prototype.onNoTranscript,
  "conversation.item.deleted": Talk.prototype.onDeleted,
  "conversation.item.truncated": Talk.prototype.onTruncated,
  "conversation.item.retrieved": Talk.prototype.onRetrieved,
  "response.created": Talk.prototype.onCreated,
  "response.output_item.added"(event) {
    const answer = this.of(event);
    if (answer) answer.itemId = event.item.id;
  },
  "response.output_audio_transcript.delta"(event) {
    this.onText(this.of(event), event);
  },
  "response.output_audio_transcript.done"(event) {
    this.onText(this.of(event), event);
  },
  "response.output_text.delta"(event) {
    this.onText(this.of(event), event);
  },
  "response.output_text.done"(event) {
    this.onText(this.of(event), event);
  },
  "response.output_audio.done"(event) {
    this.onAudioDone(this.of(event));
  },
  "response.done": Talk.prototype.onDone,
  "fleet.request"(event) {
    const answer = this.of(event);
    if (answer) answer.requestId = event.request_id;
    this.view.showRequest(event.request_id);
  },
  "fleet.audio": Talk.prototype.onAudio,
  "fleet.voiced"(event) {
    const answer = this.of(event);
    if (!answer) return;
    answer.voiced = event.sample;
    this.noteLatency(answer);
  },
  "fleet.timing": Talk.prototype.onTiming,
  "fleet.resumed": Talk.prototype.onResumed,
  error: Talk.prototype.onError,
};
