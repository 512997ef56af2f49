// The microphone: opening, muting, closing, and its blocks of PCM16.

const MAX_OFFSETS = 50; // blocks, one second: the context's clock stands still while its thread does
const SETTINGS = { echoCancellation: true, noiseSuppression: true, autoGainControl: true, channelCount: 1 };

/**
 * Dispatches "open" before the first block, when the rate is known; "block" ({pcm: ArrayBuffer, rms, at: time at which its last
 * sample reached the microphone}); "closed" when it stops capturing or opening; and "lost" when the device disappears.
 */
export class Microphone extends EventTarget {
  /** @param {string} workletUrl */
  constructor(workletUrl) {
    super();
    this.workletUrl = workletUrl;
    this.stream = null;
    this.node = null;
    /** The attempt to open it that is in progress, if any. */
    this.attempt = null;
    this.muted = false;
    this.rms = 0;
    this.rateHz = 0;
  }

  get on() {
    return this.node !== null;
  }

  get opening() {
    return this.attempt !== null;
  }

  get deviceId() {
    return this.stream?.getAudioTracks()[0]?.getSettings().deviceId ?? "";
  }

  /**
   * @param {string} deviceId empty for the system's default
   * @returns {Promise<boolean>} false if it was closed or reopened meanwhile. Raises: DOMException as getUserMedia does.
   */
  async open(deviceId) {
    this.close();
    if (!navigator.mediaDevices?.getUserMedia) throw new DOMException("no mediaDevices here", "SecurityError");
    const attempt = (this.attempt = {});
    // load it into the browser's cache while the device opens, or the download would lose the first words
    fetch(this.workletUrl).catch(() => null);
    try {
      const stream = await this.requestStream(deviceId);
      if (this.attempt !== attempt) {
        stream.getTracks().forEach((track) => track.stop());
        return false;
      }
      const [track] = stream.getAudioTracks();
      track.addEventListener("ended", () => this.stream === stream && this.onLost());
      this.stream = stream;
      await this.listen(stream, track, attempt);
    } catch (error) {
      if (this.attempt !== attempt) return false;
      this.close();
      throw error;
    }
    return this.attempt === null && this.on;
  }

  async requestStream(deviceId) {
    const chosen = deviceId ? { deviceId: { exact: deviceId } } : {};
    try {
      return await navigator.mediaDevices.getUserMedia({ audio: { ...SETTINGS, ...chosen } });
    } catch (error) {
      // the chosen device was unplugged: use any other
      if (!deviceId || !["OverconstrainedError", "NotFoundError"].includes(error.name)) throw error;
      return navigator.mediaDevices.getUserMedia({ audio: SETTINGS });
    }
  }

  async listen(stream, track, attempt) {
    const [context, source] = connect(stream, track);
    this.context = context;
    this.rateHz = context.sampleRate;
    this.latencyMs = 1000 * (track.getSettings().latency ?? 0);
    this.offsets = [];
    await context.audioWorklet.addModule(this.workletUrl);
    if (context.state !== "running") await context.resume();
    if (this.attempt !== attempt) return;
    this.attempt = null;
    this.node = new AudioWorkletNode(context, "fleet-mic", { numberOfInputs: 1, outputChannelCount: [1] });
    this.node.port.onmessage = ({ data }) => this.onBlock(data);
    this.dispatchEvent(new Event("open"));
    // its output is silent, but a node without a destination may not run
    source.connect(this.node).connect(context.destination);
  }

  /** Call it at the end of a touch: some browsers start audio only then. */
  wake() {
    if (this.context?.state === "suspended") this.context.resume();
  }

  /** Convert a time of the context. Messages of its thread come late to a busy page and never early: the earliest of them tells the time. */
  pageTime(time) {
    this.offsets.push(performance.now() - 1000 * time);
    if (this.offsets.length > MAX_OFFSETS) this.offsets.shift();
    return 1000 * time + Math.min(...this.offsets) - this.latencyMs;
  }

  onBlock({ pcm, rms, time }) {
    this.rms = this.muted ? 0 : rms;
    const block = this.muted ? new ArrayBuffer(pcm.byteLength) : pcm;
    this.dispatchEvent(new CustomEvent("block", { detail: { pcm: block, rms: this.rms, at: this.pageTime(time) } }));
  }

  onLost() {
    this.close();
    this.dispatchEvent(new Event("lost"));
  }

  close() {
    this.stream?.getTracks().forEach((track) => track.stop());
    if (this.node) this.node.port.onmessage = null;
    this.context?.close();
    Object.assign(this, { stream: null, node: null, context: null, attempt: null, rms: 0 });
    this.dispatchEvent(new Event("closed"));
  }
}

/** Firefox refuses a microphone in a context of another rate: use the microphone's rate then. */
function connect(stream, track) {
  let context = new AudioContext({ latencyHint: "interactive" });
  try {
    return [context, context.createMediaStreamSource(stream)];
  } catch (error) {
    context.close();
    if (error.name !== "NotSupportedError") throw error;
    context = new AudioContext({ latencyHint: "interactive", sampleRate: track.getSettings().sampleRate });
    return [context, context.createMediaStreamSource(stream)];
  }
}
