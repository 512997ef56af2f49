// Chooses the state that the page shows. Pure functions.

/** [state, condition, label] in order: the first whose condition holds is shown. */
const STATES = [
  ["ended", (f) => f.ended, () => "Ended"],
  ["refused", (f) => f.refused, () => "Not connected"],
  ["connecting", (f) => !f.connected && !f.everConnected, () => "Connecting"],
  ["reconnecting", (f) => !f.connected, () => "Reconnecting"],
  ["queued", (f) => f.queued > 0, (f) => `Waiting in line: place ${f.queued}`],
  ["interrupted", (f) => f.interrupted, () => "Interrupted"],
  ["opening", (f) => f.opening, () => "Opening the microphone"],
  ["hearing", (f) => f.hearing, () => "Hearing you"],
  ["speaking", (f) => f.playing, () => "Speaking"],
  ["thinking", (f) => f.thinking, () => "Thinking"],
  ["muted", (f) => f.mic && f.muted, () => "Muted"],
  ["hold", (f) => f.mic && f.pushToTalk, () => "Hold to talk"],
  ["listening", (f) => f.mic, () => "Listening"],
  ["ready", () => true, () => "Ready"],
];

/**
 * @param {{ended: boolean, refused: boolean, connected: boolean, everConnected: boolean, queued: number, interrupted: boolean,
 *   hearing: boolean, playing: boolean, thinking: boolean, opening: boolean, mic: boolean, muted: boolean, pushToTalk: boolean}} facts
 * @returns {{state: string, label: string}} "speaking" only while audio is played
 */
export function findState(facts) {
  const [state, , label] = STATES.find(([, holds]) => holds(facts));
  return { state, label: label(facts) };
}
