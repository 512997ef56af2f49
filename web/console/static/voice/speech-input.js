// The user's speech: audio of the microphone that is sent, and push to talk.

import { Question } from "./answer.js";
import { SentAudio } from "./latency.js";
import { MIC_WAS_OPENING } from "./reasons.js";

const GUARD_PLAYED_S = 1.5; // until the browser's echo cancellation has settled
const GUARD_LEVEL = 0.25; // of the level that is played
const MIN_PRESS_MS = 250; // the server needs 100 ms of audio, which begins a while after the press

export class SpeechInput {
  /** @param {{mic: object, player: object|null, socket: object, recording: object, settings: object}} parts @param {object} conversation */
  constructor({ mic, player, socket, recording, settings }, conversation) {
    Object.assign(this, { mic, player, socket, recording, settings, conversation });
    /** True while the button is down. Speech is recorded since `pressedAt`, null while the microphone is still opening. */
    this.pressed = false;
    this.pressedBeforeOpen = false;
    this.pressedAt = null;
    this.sent = new SentAudio();
    mic.addEventListener("open", () => this.onOpen());
    mic.addEventListener("block", ({ detail }) => this.onBlock(detail));
  }

  /** A new session counts audio from its first sample. */
  reset() {
    this.sent = new SentAudio();
  }

  onBlock({ pcm, rms, at }) {
    this.recording.addMicrophoneBlock(pcm, this.mic.rateHz, at);
    if (this.settings.pushToTalk && this.pressedAt === null) return;
    const block = this.isLikelyEcho(rms) ? new ArrayBuffer(pcm.byteLength) : pcm;
    this.sent.add((1000 * pcm.byteLength) / 2 / this.mic.rateHz, at);
    this.socket.sendAudio(block);
  }

  /** While the first answer begins, only input that is clearly louder than its echo counts as speech. */
  isLikelyEcho(rms) {
    const { player } = this;
    if (this.settings.pushToTalk || !player?.playing || player.totalPlayed > GUARD_PLAYED_S * player.rateHz) return false;
    return rms < GUARD_LEVEL * player.rms;
  }

  /** The session receives the microphone's rate before its audio; a button that is down records from here on. */
  onOpen() {
    this.conversation.configure();
    if (this.pressed) this.record();
    this.conversation.refresh();
  }

  /** Push to talk: the button or the space bar goes down. */
  press() {
    if (this.pressed || !this.settings.pushToTalk || !(this.mic.on || this.mic.opening)) return;
    this.pressed = true;
    this.pressedBeforeOpen = this.mic.opening;
    this.conversation.stop();
    this.conversation.clearReasons();
    if (this.mic.on) this.record();
    this.conversation.refresh();
  }

  record() {
    this.pressedAt = performance.now();
    this.socket.sendOrHold({ type: "input_audio_buffer.clear" });
    this.question = this.conversation.number(new Question("speech"));
    this.conversation.put(this.question);
  }

  release() {
    if (!this.pressed) return;
    this.pressed = false;
    const recording = this.pressedAt !== null;
    const lengthMs = recording ? performance.now() - this.pressedAt : 0;
    this.pressedAt = null;
    if (lengthMs >= MIN_PRESS_MS) this.commit(lengthMs);
    else if (recording) this.discard();
    const lost = this.pressedBeforeOpen && lengthMs < MIN_PRESS_MS && (recording || this.mic.opening);
    if (lost) this.conversation.view.showReason(MIC_WAS_OPENING, "answer");
    this.conversation.refresh();
  }

  /** The session has ended: stop recording. */
  cancel() {
    this.pressed = false;
    this.pressedAt = null;
  }

  discard() {
    this.socket.sendOrHold({ type: "input_audio_buffer.clear" });
    this.conversation.remove(this.question);
  }

  /** Without turn detection and push to talk: what was said so far is the turn. */
  end() {
    this.question = this.conversation.number(new Question("speech"));
    this.conversation.put(this.question);
    this.commit(0);
  }

  /** The answer is requested once the server confirms the audio: it may find too little of it. */
  commit(lengthMs) {
    Object.assign(this.question, { state: "waiting", endedAt: performance.now(), lengthMs });
    this.socket.sendOrHold({ type: "input_audio_buffer.commit" });
    this.conversation.view.turnChanged(this.question);
  }
}
