// The Vercel AI SDK's typed output and tools, over chat and over responses. Prints JSON.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const [url, prompt] = process.argv.slice(2);
const options = { baseURL: url, apiKey: "any" };
const compatible = createOpenAICompatible({
  ...options, name: "hedgerow", supportsStructuredOutputs: true,
});
const openai = createOpenAI(options);
const schema = z.object({ first: z.int(), last: z.boolean() });
const request = { prompt, maxRetries: 0 };
const answer = tool({ description: "Takes the answer.", inputSchema: schema });
const forced = { ...request, tools: { answer }, toolChoice: "required" };

const models = { compatible: compatible("sprig"), chat: openai.chat("sprig"), response: openai("sprig") };
const output = {};
for (const [name, model] of Object.entries(models)) {
  const whole = await generateObject({ model, schema, ...request });
  const stream = streamObject({ model, schema, ...request });
  for await (const _ of stream.partialObjectStream);
  const streamed = await stream.object;
  const called = await generateText({ model, ...forced });
  const calling = streamText({ model, ...forced });
  await calling.consumeStream();
  const calls = await calling.toolCalls;
  output[name] = {
    whole: whole.object, streamed, called: called.toolCalls[0].input, reason: called.finishReason,
    streamed_call: calls[0].input,
  };
}
console.log(JSON.stringify(output));
