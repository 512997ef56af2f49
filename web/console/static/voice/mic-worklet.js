// Cuts the microphone's samples into blocks of 20 ms of PCM16, each with its level and the context's time after its last sample.

const BLOCK_S = 0.02;

class MicProcessor extends AudioWorkletProcessor {
  constructor() {
    super();
    this.size = Math.round(BLOCK_S * sampleRate);
    this.start();
  }

  start() {
    this.block = new Int16Array(this.size);
    this.filled = 0;
    this.squares = 0;
  }

  process(inputs) {
    const samples = inputs[0][0];
    if (!samples) return true;
    for (let n = 0; n < samples.length; n += 1) this.take(samples[n], currentTime + (n + 1) / sampleRate);
    return true;
  }

  take(sample, time) {
    this.block[this.filled] = Math.max(-32768, Math.min(32767, Math.round(sample * 32768)));
    this.squares += sample * sample;
    this.filled += 1;
    if (this.filled < this.size) return;
    const { buffer } = this.block;
    this.port.postMessage({ pcm: buffer, rms: Math.sqrt(this.squares / this.size), time }, [buffer]);
    this.start();
  }
}

registerProcessor("fleet-mic", MicProcessor);
