// The visitor's side: what the microphone gives, what of it is sent, and push to talk. Knows no answer and no element of the page.

import { Question } from "./answer.js";
import { SentSound } from "./latency.js";
import { MIC_WAS_STARTING } from "./reasons.js";

const GUARD_PLAYED_S = 1.5; // until echo cancelling has settled
const GUARD_LEVEL = 0.25; // of what is played
const SHORTEST_TALK_MS = 250; // the server wants 100 ms of sound, and the first of it comes a while after the press

export class Speech {
  /** @param {{mic: object, player: object|null, socket: object, recording: object, settings: object}} parts @param {object} talk */
  constructor({ mic, player, socket, recording, settings }, talk) {
    Object.assign(this, { mic, player, socket, recording, settings, talk });
    /** The button is down; what is said is recorded since `pressedAt`, null while the microphone is still opening. */
    this.held = false;
    /** It went down before the microphone was open. */
    this.late = false;
    this.pressedAt = null;
    this.sent = new SentSound();
    mic.addEventListener("open", () => this.onOpen());
    mic.addEventListener("block", ({ detail }) => this.onBlock(detail));
  }

  /** The server counts the sound of a new session from its beginning. */
  begin() {
    this.sent = new SentSound();
  }

  onBlock({ pcm, rms, at }) {
    this.recording.userBlock(pcm, this.mic.rateHz, at);
    if (this.settings.walkie && this.pressedAt === null) return;
    const block = this.guarded(rms) ? new ArrayBuffer(pcm.byteLength) : pcm;
    this.sent.add((1000 * pcm.byteLength) / 2 / this.mic.rateHz, at);
    this.socket.sendSound(block);
  }

  /** While the first answer begins, only what is clearly louder than its echo counts as speech. */
  guarded(rms) {
    const { player } = this;
    if (this.settings.walkie || !player?.playing || player.totalPlayed > GUARD_PLAYED_S * player.rateHz) return false;
    return rms < GUARD_LEVEL * player.rms;
  }

  /** The microphone opened: a session hears its rate before any of its sound, and a button that is down is heard from here on. */
  onOpen() {
    this.talk.configure();
    if (this.held) this.record();
    this.talk.refresh();
  }

  /** Push to talk: the button or the space bar goes down. */
  press() {
    if (this.held || !this.settings.walkie || !(this.mic.on || this.mic.opening)) return;
    this.held = true;
    this.late = this.mic.opening;
    this.talk.stop();
    this.talk.forgetReasons();
    if (this.mic.on) this.record();
    this.talk.refresh();
  }

  record() {
    this.pressedAt = performance.now();
    this.socket.keep({ type: "input_audio_buffer.clear" });
    this.question = this.talk.numbered(new Question("speech"));
    this.talk.put(this.question);
  }

  release() {
    if (!this.held) return;
    this.held = false;
    const recording = this.pressedAt !== null;
    const lengthMs = recording ? performance.now() - this.pressedAt : 0;
    this.pressedAt = null;
    if (lengthMs >= SHORTEST_TALK_MS) this.commit(lengthMs);
    else if (recording) this.takeBack();
    const lost = this.late && lengthMs < SHORTEST_TALK_MS && (recording || this.mic.opening);
    if (lost) this.talk.view.showReason(MIC_WAS_STARTING, "answer");
    this.talk.refresh();
  }

  /** The session is over: what is being said goes nowhere. */
  drop() {
    this.held = false;
    this.pressedAt = null;
  }

  takeBack() {
    this.socket.keep({ type: "input_audio_buffer.clear" });
    this.talk.takeBack(this.question);
  }

  /** Its answer is asked for once the server has the sound: it may find too little in it. */
  commit(lengthMs) {
    Object.assign(this.question, { state: "waiting", endedAt: performance.now(), lengthMs });
    this.socket.keep({ type: "input_audio_buffer.commit" });
    this.talk.view.turnChanged(this.question);
  }
}
