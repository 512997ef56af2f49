// The connection: events as JSON, sound as binary frames, and a new attempt when it is lost. Knows no event's meaning.

const RECONNECT_MS = [100, 250, 500, 1000, 2000, 4000];
const HEADER_BYTES = 8;
const MAX_HELD_BLOCKS = 250; // five seconds of the microphone, kept while there is no connection
const FULL_MS = 5000;
const FULL = 1013;
const REFUSED = [1000, 1008, 3000, 4000]; // ended, or refused (see web/realtime/transport/refusal.py): the next attempt would be, too

/**
 * Dispatches "event" (detail: the event), "sound" ({serial, offset, pcm: Int16Array}), "down" ({attempt}) and "refused"
 * ({code, reason, again: whether another attempt follows}).
 */
export class Socket extends EventTarget {
  /** @param {() => string} address where to connect, asked anew at each attempt */
  constructor(address) {
    super();
    this.address = address;
    this.attempt = 0;
    /** @type {(ArrayBuffer|object)[]} sound and events in their order, for when there is a session */
    this.held = [];
    this.ready = false;
  }

  connect() {
    const socket = new WebSocket(this.address());
    this.socket = socket;
    socket.binaryType = "arraybuffer";
    socket.onmessage = ({ data }) => (typeof data === "string" ? this.onEvent(JSON.parse(data)) : this.onSound(data));
    socket.onclose = (event) => this.socket === socket && this.onClose(event);
  }

  /** A new connection in place of this one. */
  restart() {
    this.leave();
    this.held = [];
    this.attempt = 0;
    this.connect();
  }

  onEvent(event) {
    this.dispatchEvent(new CustomEvent("event", { detail: event }));
  }

  onSound(data) {
    const view = new DataView(data);
    const samples = new Int16Array((data.byteLength - HEADER_BYTES) >> 1);
    for (let n = 0; n < samples.length; n += 1) samples[n] = view.getInt16(HEADER_BYTES + 2 * n, true);
    const detail = { serial: view.getUint32(0, true), offset: view.getUint32(4, true), pcm: samples };
    this.dispatchEvent(new CustomEvent("sound", { detail }));
  }

  onClose({ code, reason }) {
    this.ready = false;
    const again = !REFUSED.includes(code);
    if (!again || code === FULL) this.dispatchEvent(new CustomEvent("refused", { detail: { code, reason, again } }));
    if (!again) return;
    const wait = code === FULL ? FULL_MS : RECONNECT_MS[Math.min(this.attempt, RECONNECT_MS.length - 1)];
    this.attempt += 1;
    this.dispatchEvent(new CustomEvent("down", { detail: { attempt: this.attempt } }));
    this.timer = setTimeout(() => this.connect(), wait);
  }

  /** The page goes: what is made for it need not be. */
  leave() {
    const old = this.socket;
    this.socket = null;
    this.ready = false;
    clearTimeout(this.timer);
    old?.close(1000);
  }

  /** The session is there. What is held goes with `flush`: what it means may have to be told first. */
  admit() {
    this.attempt = 0;
    this.ready = true;
  }

  flush() {
    for (const frame of this.held.splice(0)) this.socket.send(isSound(frame) ? frame : JSON.stringify(frame));
  }

  /** @param {(event: object) => boolean} isVain which of the events that are held mean nothing any more */
  dropHeld(isVain) {
    this.held = this.held.filter((frame) => isSound(frame) || !isVain(frame));
  }

  /** A connection that is closing takes nothing any more, and says so only later. */
  get takes() {
    return this.ready && this.socket.readyState === WebSocket.OPEN;
  }

  /** @param {object} event @returns {boolean} false without a session to take it */
  send(event) {
    if (!this.takes) return false;
    this.socket.send(JSON.stringify(event));
    return true;
  }

  /** @param {object} event sent now; or once there is a session, in its place among the sound */
  keep(event) {
    if (!this.send(event)) this.held.push(event);
  }

  /** @param {ArrayBuffer} block PCM16 at the declared rate */
  sendSound(block) {
    if (this.takes) {
      this.socket.send(block);
      return;
    }
    this.held.push(block);
    if (this.held.filter(isSound).length > MAX_HELD_BLOCKS) this.held.splice(this.held.findIndex(isSound), 1);
  }
}

function isSound(frame) {
  return frame instanceof ArrayBuffer;
}
