// The WebSocket: events as JSON, audio as binary frames, reconnects. Does not interpret events.

const RECONNECT_MS = [100, 250, 500, 1000, 2000, 4000];
const HEADER_BYTES = 8;
const MAX_HELD_BLOCKS = 250; // five seconds of the microphone, held while disconnected
const FULL_RETRY_MS = 5000;
const FULL = 1013;
const FINAL = [1000, 1008, 3000, 4000]; // ended or refused (see web/realtime): another attempt would be refused too

/**
 * Dispatches "event" (detail: the event), "audio" ({serial, offset, pcm: Int16Array}), "disconnected" ({attempt}) and "refused"
 * ({code, reason, again: true if another attempt follows}).
 */
export class Socket extends EventTarget {
  /** @param {() => string} getUrl called at each attempt */
  constructor(getUrl) {
    super();
    this.getUrl = getUrl;
    this.attempt = 0;
    /** @type {(ArrayBuffer|object)[]} audio and events, in order, to send once there is a session */
    this.held = [];
    this.ready = false;
  }

  connect() {
    const socket = new WebSocket(this.getUrl());
    this.socket = socket;
    socket.binaryType = "arraybuffer";
    socket.onmessage = ({ data }) => (typeof data === "string" ? this.onEvent(JSON.parse(data)) : this.onAudio(data));
    socket.onclose = (event) => this.socket === socket && this.onClose(event);
  }

  /** Replace the connection by a new one. */
  restart() {
    this.close();
    this.held = [];
    this.attempt = 0;
    this.connect();
  }

  onEvent(event) {
    this.dispatchEvent(new CustomEvent("event", { detail: event }));
  }

  onAudio(data) {
    const view = new DataView(data);
    const samples = new Int16Array((data.byteLength - HEADER_BYTES) >> 1);
    for (let n = 0; n < samples.length; n += 1) samples[n] = view.getInt16(HEADER_BYTES + 2 * n, true);
    const detail = { serial: view.getUint32(0, true), offset: view.getUint32(4, true), pcm: samples };
    this.dispatchEvent(new CustomEvent("audio", { detail }));
  }

  onClose({ code, reason }) {
    this.ready = false;
    const again = !FINAL.includes(code);
    if (!again || code === FULL) this.dispatchEvent(new CustomEvent("refused", { detail: { code, reason, again } }));
    if (!again) return;
    const wait = code === FULL ? FULL_RETRY_MS : RECONNECT_MS[Math.min(this.attempt, RECONNECT_MS.length - 1)];
    this.attempt += 1;
    this.dispatchEvent(new CustomEvent("disconnected", { detail: { attempt: this.attempt } }));
    this.timer = setTimeout(() => this.connect(), wait);
  }

  /** Close for good: the server ends the session's work. */
  close() {
    const old = this.socket;
    this.socket = null;
    this.ready = false;
    clearTimeout(this.timer);
    old?.close(1000);
  }

  /** The session exists. What is held waits for `flush`: the session may need its history first. */
  admit() {
    this.attempt = 0;
    this.ready = true;
  }

  flush() {
    for (const frame of this.held.splice(0)) this.socket.send(isAudio(frame) ? frame : JSON.stringify(frame));
  }

  /** @param {(event: object) => boolean} isObsolete true for held events to drop */
  dropHeld(isObsolete) {
    this.held = this.held.filter((frame) => isAudio(frame) || !isObsolete(frame));
  }

  /** False as soon as the connection is closing, before its close event. */
  get isOpen() {
    return this.ready && this.socket.readyState === WebSocket.OPEN;
  }

  /** @param {object} event @returns {boolean} false without a session to receive it */
  send(event) {
    if (!this.isOpen) return false;
    this.socket.send(JSON.stringify(event));
    return true;
  }

  /** @param {object} event sent now, or once there is a session, in its order among the audio */
  sendOrHold(event) {
    if (!this.send(event)) this.held.push(event);
  }

  /** @param {ArrayBuffer} block PCM16 at the declared rate */
  sendAudio(block) {
    if (this.isOpen) {
      this.socket.send(block);
      return;
    }
    this.held.push(block);
    if (this.held.filter(isAudio).length > MAX_HELD_BLOCKS) this.held.splice(this.held.findIndex(isAudio), 1);
  }
}

function isAudio(frame) {
  return frame instanceof ArrayBuffer;
}
