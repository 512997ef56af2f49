// The microphone's level and the noise of the room, in dB below full scale. Pure.

const LOWEST_DBFS = -90;
const MAX_LEVELS = 250; // blocks of 20 ms: five seconds
const FLOOR_EVERY = 25;
const FLOOR_SHARE = 0.1; // of the blocks are as quiet as the floor: pauses between words are
// measured with white noise: from -30 on, turns end up to 0.1 s later, and at -25 those of a quiet voice begin 0.2 s late
const HINTS = [
  [-50, "Quiet"],
  [-30, "Some noise"],
  [0, "Noisy: speech is detected late"],
];

/** Units: dBFS. `floor` is null for the first half second. */
export class NoiseMeter {
  constructor() {
    this.reset();
  }

  reset() {
    this.levels = [];
    this.level = LOWEST_DBFS;
    this.floor = null;
    this.count = 0;
  }

  /** @param {number} rms of the next block */
  add(rms) {
    this.level = Math.max(LOWEST_DBFS, 20 * Math.log10(rms || Number.MIN_VALUE));
    this.levels.push(this.level);
    if (this.levels.length > MAX_LEVELS) this.levels.shift();
    this.count += 1;
    if (this.count % FLOOR_EVERY === 0) this.floor = [...this.levels].sort((a, b) => a - b)[Math.floor(FLOOR_SHARE * this.levels.length)];
  }

  get hint() {
    return this.floor === null ? "" : HINTS.find(([most]) => this.floor <= most)[1];
  }
}
