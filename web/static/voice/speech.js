// The visitor's side: what the microphone gives, what of it is sent, and push to talk. Knows no answer and no element of the page.

import { Question } from "./answer.js";
import { SentSound } from "./latency.js";

const GUARD_PLAYED_S = 1.5; // until echo cancelling has settled
const GUARD_LEVEL = 0.25; // of what is played
const SHORTEST_TALK_MS = 250; // the server wants 100 ms of sound, and the first of it comes a while after the press

export class Speech {
  /** @param {{mic: object, player: object|null, socket: object, recording: object, settings: object}} parts @param {object} talk */
  constructor({ mic, player, socket, recording, settings }, talk) {
    Object.assign(this, { mic, player, socket, recording, settings, talk });
    this.pressedAt = null;
    this.sent = new SentSound();
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

  /** Push to talk: the button or the space bar goes down. */
  press() {
    if (this.pressedAt !== null || !this.mic.on || !this.settings.walkie) return;
    this.talk.stop();
    this.talk.forgetReasons();
    this.pressedAt = performance.now();
    this.socket.keep({ type: "input_audio_buffer.clear" });
    this.question = this.talk.numbered(new Question("speech"));
    this.talk.put(this.question);
  }

  release() {
    if (this.pressedAt === null) return;
    const lengthMs = performance.now() - this.pressedAt;
    this.pressedAt = null;
    if (lengthMs < SHORTEST_TALK_MS) this.takeBack();
    else this.commit(lengthMs);
    this.talk.refresh();
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
