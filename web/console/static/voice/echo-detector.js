// Detects that the model interrupts itself: its voice returns through the microphone and counts as speech of the user.

import { ECHO_SUSPECTED } from "./reasons.js";

const WINDOW_MS = 500; // from the first voiced sample that was audible
const WARN_AT = 2; // interruptions within the window
const UNDISTURBED_MS = 1500; // of an answer's voice without an interruption: longer than an echo takes to be detected
const MAX_ECHO_MS = 1200; // length of a turn, with the silence around it: an echo ends with the audio that causes it

export class EchoDetector {
  /** @param {{mic: object, view: object, settings: object}} parts */
  constructor({ mic, view, settings }) {
    Object.assign(this, { mic, view, settings });
    this.reset();
  }

  reset() {
    this.count = 0;
  }

  /** @param {object|null} answer that was interrupted @returns {boolean} true if the interruption may be its echo */
  onInterruption(answer) {
    if (!answer?.live) return false;
    const ms = msSinceVoiced(answer);
    if (ms === null || ms < 0 || ms >= WINDOW_MS) return false;
    this.count += 1;
    if (this.count === WARN_AT && !this.settings.pushToTalk) this.view.showReason(ECHO_SUSPECTED, "echo");
    return true;
  }

  /** Speech that continues after the answer fell silent is a person's. */
  onSpeechEnd(question) {
    if (!question.maybeEcho || question.lengthMs < MAX_ECHO_MS) return;
    question.maybeEcho = false;
    this.count -= 1;
    if (this.count < WARN_AT) this.view.showReason(null, "echo");
  }

  /** An answer that plays into an open microphone without an interruption shows that earlier interruptions were no echo. */
  onPlayback(answer, ended, userSpeaking) {
    if (this.count === 0 || this.settings.pushToTalk || !this.mic.on || this.mic.muted || answer.cut || userSpeaking) return;
    const ms = msSinceVoiced(answer);
    if (ms === null || ms < (ended ? WINDOW_MS : UNDISTURBED_MS)) return;
    this.count = 0;
    this.view.showReason(null, "echo");
  }
}

/** Return the time since the answer's first voiced sample was audible, null before it was. */
function msSinceVoiced({ audibleAt, silenceMs }) {
  return audibleAt === null || silenceMs === null ? null : performance.now() - (audibleAt + silenceMs);
}
