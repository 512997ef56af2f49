// Vercel's AI SDK: its OpenAI provider, whose default is the API of responses, and its provider for compatible servers, which chats.
// Arguments: its environment, URL, model, WAV file. Prints one JSON line per feature.
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [home, URL, MODEL, WAV] = process.argv.slice(2);
const installed = createRequire(`${home}/`);
const load = (name) => import(pathToFileURL(installed.resolve(name)).href);
const { generateObject, generateSpeech, generateText, isStepCount, Output, streamText, tool, transcribe } = await load("ai");
const { createOpenAI } = await load("@ai-sdk/openai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { z } = await load("zod");

const endpoint = { baseURL: `${URL}/v1`, apiKey: "none" };
const openai = createOpenAI(endpoint);
const compatible = createOpenAICompatible({ name: "fleet", includeUsage: true, supportsStructuredOutputs: true, ...endpoint });
const SAID = "Hello there, this is the answer.";
const WANTED = { city: "Paris", days: 2 };
const schema = z.object({ city: z.string(), days: z.number().int() });
const asked = (model, fields = {}) => ({ model, prompt: "hello", maxRetries: 0, ...fields });

async function says(model) {
  const answer = await generateText(asked(model));
  assert.equal(answer.text, SAID);
  assert.ok(answer.usage.outputTokens > 0);
}

async function streams(model) {
  let said = "";
  const answer = streamText(asked(model, { onError: ({ error }) => { throw error; } }));
  for await (const part of answer.textStream) said += part;
  assert.equal(said, SAID);
  assert.ok((await answer.usage).outputTokens > 0);
}

async function calls(model) {
  const called = [];
  const get_weather = tool({ description: "The weather.", inputSchema: schema, execute: (given) => { called.push(given); return "25 C"; } });
  const answer = await generateText(asked(model, { tools: { get_weather }, stopWhen: isStepCount(3) }));
  assert.equal(answer.text, SAID);
  assert.deepEqual(called, [WANTED]);
}

async function streamsCalls(model) {
  const called = [];
  const get_weather = tool({ description: "The weather.", inputSchema: schema, execute: (given) => { called.push(given); return "25 C"; } });
  const answer = streamText(asked(model, { tools: { get_weather }, stopWhen: isStepCount(3), onError: ({ error }) => { throw error; } }));
  assert.equal(await answer.text, SAID);
  assert.deepEqual(called, [WANTED]);
}

async function generates(model) {
  assert.deepEqual((await generateObject(asked(model, { schema }))).object, WANTED);
}

async function outputs(model) {
  assert.deepEqual((await generateText(asked(model, { output: Output.object({ schema }) }))).output, WANTED);
}

async function check_responses() {
  await says(openai(MODEL));
}

async function check_responses_stream() {
  await streams(openai(MODEL));
}

async function check_responses_tools() {
  await calls(openai(MODEL));
}

async function check_responses_streamed_tools() {
  await streamsCalls(openai(MODEL));
}

async function check_responses_generateObject() {
  await generates(openai(MODEL));
}

async function check_responses_output() {
  await outputs(openai(MODEL));
}

async function check_chat() {
  await says(openai.chat(MODEL));
}

async function check_chat_stream() {
  await streams(openai.chat(MODEL));
}

async function check_chat_tools() {
  await calls(openai.chat(MODEL));
}

async function check_chat_generateObject() {
  await generates(openai.chat(MODEL));
}

async function check_compatible_chat() {
  await says(compatible(MODEL));
}

async function check_compatible_stream() {
  await streams(compatible(MODEL));
}

async function check_compatible_tools() {
  await calls(compatible(MODEL));
}

async function check_compatible_streamed_tools() {
  await streamsCalls(compatible(MODEL));
}

async function check_compatible_generateObject() {
  await generates(compatible(MODEL));
}

async function check_speech() {
  const { audio } = await generateSpeech({ model: openai.speech(MODEL), text: "hello", voice: "marin", outputFormat: "wav", maxRetries: 0 });
  assert.equal(Buffer.from(audio.uint8Array).subarray(0, 4).toString(), "RIFF");
}

async function check_speech_with_defaults() {
  const { audio } = await generateSpeech({ model: openai.speech(MODEL), text: "hello", maxRetries: 0 });
  assert.equal(audio.mediaType, "audio/mpeg");
}

async function check_transcription() {
  const heard = await transcribe({ model: openai.transcription(MODEL), audio: await readFile(WAV), maxRetries: 0 });
  assert.equal(heard.text, "What day comes after Monday?");
}

const checks = [
  check_responses, check_responses_stream, check_responses_tools, check_responses_streamed_tools, check_responses_generateObject, check_responses_output,
  check_chat, check_chat_stream, check_chat_tools, check_chat_generateObject,
  check_compatible_chat, check_compatible_stream, check_compatible_tools, check_compatible_streamed_tools, check_compatible_generateObject,
  check_speech, check_speech_with_defaults, check_transcription,
];
for (const check of checks) {
  const why = await check().then(() => "", (error) => `${error.name}: ${error.message}`);
  console.log(JSON.stringify({ feature: check.name.slice(6), ok: why === "", why }));
}
