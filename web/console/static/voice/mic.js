// The microphone: opening, muting, closing, and its blocks of PCM16. Knows no protocol.

const SETTINGS = { echoCancellation: true, noiseSuppression: true, autoGainControl: true, channelCount: 1 };

/**
 * Dispatches "open" before the first block, when the rate is known; "block" ({pcm: ArrayBuffer, rms, at: when its last sample was
 * heard}); "closed" whenever it stops capturing or trying to; and "lost" when the device goes.
 */
export class Microphone extends EventTarget {
  /** @param {string} workletUrl */
  constructor(workletUrl) {
    super();
    this.workletUrl = workletUrl;
    this.stream = null;
    this.node = null;
    /** The attempt to open it that is under way, if any. */
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
   * @param {string} deviceId empty: the system's own choice
   * @returns {Promise<boolean>} false if it was closed, or opened again, meanwhile. Raises: DOMException as getUserMedia does.
   */
  async open(deviceId) {
    this.close();
    if (!navigator.mediaDevices?.getUserMedia) throw new DOMException("no mediaDevices here", "SecurityError");
    const attempt = (this.attempt = {});
    // Into the browser's cache while the device opens, or what is said first would be lost to the download.
    fetch(this.workletUrl).catch(() => null);
    try {
      const stream = await this.ask(deviceId);
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

  async ask(deviceId) {
    const chosen = deviceId ? { deviceId: { exact: deviceId } } : {};
    try {
      return await navigator.mediaDevices.getUserMedia({ audio: { ...SETTINGS, ...chosen } });
    } catch (error) {
      // the chosen device was unplugged: any other will do
      if (!deviceId || !["OverconstrainedError", "NotFoundError"].includes(error.name)) throw error;
      return navigator.mediaDevices.getUserMedia({ audio: SETTINGS });
    }
  }

  async listen(stream, track, attempt) {
    const [context, source] = connect(stream, track);
    this.context = context;
    this.rateHz = context.sampleRate;
    await context.audioWorklet.addModule(this.workletUrl);
    if (context.state !== "running") await context.resume();
    if (this.attempt !== attempt) return;
    this.attempt = null;
    this.node = new AudioWorkletNode(context, "fleet-mic", { numberOfInputs: 1, outputChannelCount: [1] });
    this.node.port.onmessage = ({ data }) => this.onBlock(data);
    this.dispatchEvent(new Event("open"));
    // It writes nothing to its output; a node that leads nowhere may not be run.
    source.connect(this.node).connect(context.destination);
  }

  /** Browsers may start sound only with the end of a touch: to be called then. */
  wake() {
    if (this.context?.state === "suspended") this.context.resume();
  }

  onBlock({ pcm, rms }) {
    this.rms = this.muted ? 0 : rms;
    const block = this.muted ? new ArrayBuffer(pcm.byteLength) : pcm;
    this.dispatchEvent(new CustomEvent("block", { detail: { pcm: block, rms: this.rms, at: performance.now() } }));
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

/** Firefox refuses a microphone in a context of another rate: then the context takes the microphone's. */
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
