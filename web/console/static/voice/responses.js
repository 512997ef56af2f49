// The model's answers: what the server sends of them, what the player played of them, and how they are interrupted.

import { Answer } from "./answer.js";
import { computeLatency } from "./latency.js";
import { serverReason } from "./reasons.js";

const REPORT_EVERY_MS = 250;
const INTERRUPTED_SHOWN_MS = 1200;
const SETTLE_MS = 1000;
const MAX_ENDPOINTING_MS = 5000;
const SILENCED_WITHIN_MS = 300;

export class Responses {
  /** @param {{socket: object, player: object|null, recording: object, view: object}} parts @param {object} conversation */
  constructor({ socket, player, recording, view }, conversation) {
    Object.assign(this, { socket, player, recording, view, conversation });
    this.lastSerial = 0; // never reset: the player drops what comes late by serial
    this.lastReportAt = 0;
    this.reset();
    player?.addEventListener("playback", ({ detail }) => this.onPlayback(detail));
  }

  reset() {
    this.byId = new Map();
    this.interruptedUntil = 0;
    this.silenced = Promise.resolve();
  }

  get current() {
    return [...this.byId.values()].at(-1) ?? null;
  }

  find(event) {
    return this.byId.get(event.response_id ?? event.response?.id);
  }

  // Events of the server

  onCreated({ response }, rateHz) {
    if (this.byId.has(response.id)) return;
    this.conversation.dropWithdrawnSpeech();
    this.lastSerial += 1;
    const answer = new Answer(response.id, this.lastSerial, rateHz);
    const { question } = this.conversation;
    if (response.metadata?.question === question?.number) {
      answer.question = question;
      this.conversation.question = null;
    } else {
      answer.cut = true; // another question was asked meanwhile
    }
    this.byId.set(response.id, answer);
    this.conversation.add(answer);
  }

  onText(answer, event) {
    const whole = event.transcript ?? event.text;
    const { endedAt } = answer.question ?? {};
    if (answer.text === "" && answer.question && answer.firstTextMs === undefined) {
      answer.firstTextMs = endedAt === null ? null : performance.now() - endedAt;
    }
    answer.text = whole === undefined ? answer.text + event.delta : whole || answer.text;
    this.view.turnChanged(answer);
  }

  onSamples({ serial, offset, pcm }) {
    const answer = [...this.byId.values()].findLast((known) => known.streamSerial === serial);
    if (!answer || answer.cut) return;
    const fresh = answer.acceptFrame(offset, pcm);
    if (fresh.length === 0) return;
    this.recording.addAnswerAudio(answer, fresh);
    this.player?.push(answer.serial, fresh);
  }

  onVoiced(answer, { sample }) {
    answer.firstVoiced = sample;
    this.updateLatency(answer);
  }

  onAudioDone(answer) {
    if (answer.audioDone) return;
    answer.audioDone = true;
    if (!answer.cut) this.player?.end(answer.serial);
  }

  onDone(answer, response) {
    if (answer.done) return;
    answer.done = true;
    this.conversation.status.serverState = "";
    if (answer.audible) this.onAudioDone(answer);
    const { status, status_details: details } = response;
    if (status === "failed") this.fail(answer, serverReason(details?.error).text);
    if (status === "incomplete") answer.notes.push("cut at the length limit");
    const tokens = response.usage?.output_token_details?.text_tokens;
    if (tokens) answer.notes.push(`${tokens} tokens`);
    if (answer.audible && status === "completed") answer.notes.push(`${(answer.received / answer.rateHz).toFixed(1)} s of speech`);
    this.view.turnChanged(answer);
  }

  fail(answer, reason) {
    answer.failure = reason;
    answer.done = true;
    if (!answer.audioDone) this.player?.end(answer.serial);
    this.view.turnChanged(answer);
    this.view.showReason({ title: "The answer failed", text: reason }, "answer");
  }

  onTruncated({ item_id }) {
    this.socket.send({ type: "conversation.item.retrieve", item_id });
  }

  /** After an interruption the session's history holds the part of the answer that was heard. */
  onRetrieved({ item }) {
    const answer = [...this.byId.values()].find((known) => known.itemId === item.id);
    const part = item.content?.find((known) => typeof (known.transcript ?? known.text) === "string");
    if (!answer || !part) return;
    answer.historyText = part.transcript ?? part.text;
    this.view.turnChanged(answer);
  }

  onTiming(answer, event) {
    answer.timing = event;
    answer.requestId ??= event.request_id;
    this.updateLatency(answer);
  }

  // After a reconnect

  startConnection() {
    for (const answer of this.byId.values()) answer.streamSerial = 0;
  }

  /** The missed events of one answer were sent again; for the others only this state is known. */
  onResumed({ response_id, transcript }) {
    for (const answer of this.byId.values()) {
      if (answer.responseId !== response_id) this.settle(answer, -1);
      else if (transcript) this.onText(answer, { transcript });
    }
  }

  /** The server has ended the answer already: it is done here once no more of its audio arrives. */
  settle(answer, received) {
    if (answer.done || answer.cut || !this.conversation.status.connected) return;
    if (answer.received === received) this.onDone(answer, { status: "completed" });
    else setTimeout(() => this.settle(answer, answer.received), SETTLE_MS);
  }

  // Latency

  updateLatency(answer) {
    const { timing, firstAudioAt, audibleAt, silenceMs, question } = answer;
    if (!timing || audibleAt === null || firstAudioAt === null || silenceMs === null || answer.latency) return;
    answer.spoken = question?.kind === "speech" && timing.voice_to_voice_ms !== null;
    answer.latency = computeLatency({ endedAt: this.findQuestionEnd(question, timing), firstAudioAt, audibleAt, silenceMs, timing });
    this.view.turnChanged(answer);
  }

  /** The server gives the end of speech as a position in the audio sent to it; another gateway may count from elsewhere. */
  findQuestionEnd(question, timing) {
    const endedAt = question?.endedAt ?? null;
    if (question?.kind !== "speech") return endedAt;
    const ms = timing.voiced_end_ms ?? null;
    const at = ms === null ? null : this.conversation.speech.sent.timeAt(ms);
    const waited = (question.stoppedAt ?? endedAt) - at;
    return at !== null && waited >= 0 && waited < MAX_ENDPOINTING_MS ? at : endedAt;
  }

  // Playback

  onPlayback(playback) {
    const answer = [...this.byId.values()].find((known) => known.serial === playback.serial);
    if (answer) this.updatePlayback(answer, playback);
    this.conversation.refresh();
  }

  updatePlayback(answer, playback) {
    const { kind, played, underruns, at } = playback;
    if (kind === "started") {
      answer.audibleAt ??= at;
      this.recording.startAnswerRun(answer, played, at);
      this.updateLatency(answer);
    }
    Object.assign(answer, { played, underruns });
    this.conversation.echo.onPlayback(answer, kind === "ended", this.conversation.userSpeaking);
    if (kind !== "started" && kind !== "report") this.recording.endAnswerRun(answer, played);
    if (kind !== "report" || performance.now() - this.lastReportAt >= REPORT_EVERY_MS) this.reportPlayback(answer, playback);
    this.view.turnChanged(answer);
  }

  /** `underruns` counts those since the last report. */
  reportPlayback(answer, playback) {
    const buffer_ms = Math.round((1000 * playback.buffered) / answer.rateHz);
    const { responseId: response_id, played: samples } = answer;
    const underruns = answer.underruns - answer.reportedUnderruns;
    if (!this.socket.send({ type: "fleet.played", response_id, samples, underruns, buffer_ms })) return;
    answer.reportedUnderruns = answer.underruns;
    this.lastReportAt = performance.now();
  }

  /**
   * Silence the answer that plays. `silenced` resolves once the server was sent the position, where it truncates its history.
   * @returns {object|null} the interrupted answer, if any
   */
  interrupt() {
    const answer = [...this.byId.values()].findLast((known) => known.live);
    if (!answer) return null;
    answer.cut = true;
    this.interruptedUntil = performance.now() + INTERRUPTED_SHOWN_MS;
    setTimeout(() => this.conversation.refresh(), INTERRUPTED_SHOWN_MS + 20);
    this.silenced = Promise.race([this.truncate(answer), new Promise((resolve) => setTimeout(resolve, SILENCED_WITHIN_MS))]);
    return answer;
  }

  async truncate(answer) {
    await this.player?.flush(answer.serial);
    answer.notes.push("interrupted");
    if (answer.itemId && answer.audible && this.conversation.turns.includes(answer)) {
      const { itemId: item_id, playedMs: audio_end_ms } = answer;
      this.socket.sendOrHold({ type: "conversation.item.truncate", item_id, content_index: 0, audio_end_ms });
    }
    this.view.turnChanged(answer);
    this.conversation.refresh();
  }
}
