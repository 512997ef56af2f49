// What was just done on the page, as programs that do the same. Pure.

const KEY = "YOUR_API_KEY";
const PLACEHOLDER = "QUESTION";
const LONGEST_WAIT_MS = 3000; // of semantic_vad, after words that are unfinished

/**
 * `session` is that of the page's session.update. `text` is what was typed, null if the question was spoken: the programs then send
 * the file question.wav (24 kHz, mono, 16 bit). `origin` is the server's address.
 * @typedef {{origin: string, model: string, session: object, text: string|null}} Done
 */

/** @param {Done} done */
export function curl({ origin, model, session, text }) {
  const { voice } = session.audio.output ?? {};
  const tools = session.tools.map(({ type, ...rest }) => ({ type, function: rest }));
  const body = {
    model,
    messages: [
      ...(session.instructions ? [{ role: "system", content: session.instructions }] : []),
      { role: "user", content: text ?? [{ type: "input_audio", input_audio: { data: PLACEHOLDER, format: "wav" } }] },
    ],
    ...(voice ? { modalities: ["text", "audio"], audio: { voice, format: "wav" } } : {}),
    ...(tools.length ? { tools } : {}),
  };
  const address = `curl ${origin}/v1/chat/completions -H 'Authorization: Bearer ${KEY}' -H 'Content-Type: application/json'`;
  const json = JSON.stringify(body, null, 2);
  if (text !== null) return `${address} \\\n  -d ${quote(json)}\n`;
  const [before, after] = json.split(`"data": "${PLACEHOLDER}"`);
  return `{ printf %s ${quote(`${before}"data": "`)}\n  base64 < question.wav | tr -d '\\n'\n  printf %s ${quote(`"${after}`)}\n} | ${address} --data-binary @-\n`;
}

/** @param {Done} done */
export function python({ origin, model, session, text }) {
  const spoken = text === null;
  const lines = ["import base64", "import wave", "", "from openai import OpenAI  # pip install 'openai[realtime]'", ""];
  if (spoken) lines.push('with wave.open("question.wav") as file:  # 24 kHz, mono, 16 bit', "    question = file.readframes(file.getnframes())");
  lines.push(`client = OpenAI(base_url=${literal(`${origin}/v1`)}, api_key="${KEY}")`, "sound = bytearray()");
  lines.push(`with client.realtime.connect(model=${literal(model)}) as connection:`);
  lines.push(`    connection.session.update(session=${literal(needed(session, spoken), "    ")})`);
  if (spoken) lines.push(...spokenPython(session));
  else lines.push(`    connection.conversation.item.create(item=${literal(message(text), "    ")})`, "    connection.response.create()");
  lines.push(
    "    for event in connection:",
    '        if event.type == "response.output_audio.delta":',
    "            sound += base64.b64decode(event.delta)",
    '        elif event.type in ("response.output_audio_transcript.delta", "response.output_text.delta"):',
    '            print(event.delta, end="", flush=True)',
    '        elif event.type == "response.function_call_arguments.done":',
    "            print(event.call_id, event.arguments)",
    '        elif event.type == "error":',
    "            raise SystemExit(event.error.message)",
    '        elif event.type == "response.done":',
    "            break",
    "",
    'with wave.open("answer.wav", "wb") as file:',
    "    file.setnchannels(1)",
    "    file.setsampwidth(2)",
    "    file.setframerate(24000)",
    "    file.writeframes(sound)",
  );
  return `${lines.join("\n")}\n`;
}

function spokenPython(session) {
  const append = (samples) => `    connection.input_audio_buffer.append(audio=base64.b64encode(${samples}).decode())`;
  if (session.audio.input.turn_detection === null) {
    return [append("question"), "    connection.input_audio_buffer.commit()", "    connection.response.create()"];
  }
  return [append("question"), `${append(`bytes(${2 * silenceSamples(session)})`)}  # the silence ends the turn`];
}

/** @param {Done} done a program for Node 22, and for browsers if nothing was spoken */
export function javascript({ origin, model, session, text }) {
  const spoken = text === null;
  const address = `${origin.replace(/^http/, "ws")}/v1/realtime?model=${encodeURIComponent(model)}`;
  const json = (value) => JSON.stringify(value, null, 2).replaceAll("\n", "\n  ");
  const sent = [{ type: "session.update", session: needed(session, spoken) }];
  if (!spoken) sent.push({ type: "conversation.item.create", item: message(text) }, { type: "response.create" });
  const sends = sent.map((event) => `  send(${json(event)});`);
  if (spoken) sends.push(...spokenJavascript(session));
  return [
    ...(spoken ? ['import { readFile } from "node:fs/promises";', "", 'const question = (await readFile("question.wav")).subarray(44); // 24 kHz, mono, 16 bit'] : []),
    `const socket = new WebSocket(${JSON.stringify(address)}, ["realtime", "openai-insecure-api-key.${KEY}"]);`,
    "const send = (event) => socket.send(JSON.stringify(event));",
    "const sound = []; // base64 of PCM16 at 24 kHz",
    'let words = "";',
    "socket.onopen = () => {",
    ...sends,
    "};",
    "socket.onmessage = ({ data }) => {",
    "  const event = JSON.parse(data);",
    '  if (event.type === "response.output_audio.delta") sound.push(event.delta);',
    '  if (["response.output_audio_transcript.delta", "response.output_text.delta"].includes(event.type)) words += event.delta;',
    '  if (event.type === "response.function_call_arguments.done") console.log(event.name, event.arguments);',
    '  if (event.type === "error") console.error(event.error.message);',
    '  if (event.type === "response.done") console.log(words, `(${sound.length} pieces of sound)`);',
    '  if (["error", "response.done"].includes(event.type)) socket.close();',
    "};",
    "",
  ].join("\n");
}

function spokenJavascript(session) {
  const append = (samples) => `  send({ type: "input_audio_buffer.append", audio: ${samples}.toString("base64") });`;
  if (session.audio.input.turn_detection === null) {
    return [append("question"), '  send({ type: "input_audio_buffer.commit" });', '  send({ type: "response.create" });'];
  }
  return [append("question"), `${append(`Buffer.alloc(${2 * silenceSamples(session)})`)} // the silence ends the turn`];
}

function silenceSamples({ audio }) {
  return 24 * (1000 + (audio.input.turn_detection.silence_duration_ms ?? LONGEST_WAIT_MS));
}

/** Return the session without what the program need not send. */
function needed({ instructions, tools, audio, ...session }, spoken) {
  const input = spoken ? { transcription: audio.input.transcription, turn_detection: audio.input.turn_detection } : null;
  return {
    ...session,
    ...(instructions ? { instructions } : {}),
    ...(tools.length ? { tools } : {}),
    audio: { ...(input ? { input } : {}), ...(audio.output ? { output: audio.output } : {}) },
  };
}

function message(text) {
  return { type: "message", role: "user", content: [{ type: "input_text", text }] };
}

/** Quote for a POSIX shell. */
function quote(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

/** Return a value of JSON in Python; a string of JSON is one of Python. */
function literal(value, indent = "") {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = `${indent}    `;
  const list = Array.isArray(value);
  const parts = list ? value.map((part) => literal(part, inner)) : Object.entries(value).map(([name, part]) => `${JSON.stringify(name)}: ${literal(part, inner)}`);
  const [open, close] = list ? "[]" : "{}";
  return parts.length ? `${open}\n${parts.map((part) => `${inner}${part},\n`).join("")}${indent}${close}` : open + close;
}
