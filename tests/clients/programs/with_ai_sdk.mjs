// The Vercel AI SDK: generateText and streamText over chat and over responses. Prints JSON.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const [url, prompt] = process.argv.slice(2);
const options = { baseURL: url, apiKey: "any" };
const compatible = createOpenAICompatible({ ...options, name: "hedgerow", includeUsage: true });
const openai = createOpenAI(options); // its default is the Responses API
const request = { prompt, seed: 3, maxOutputTokens: 24, maxRetries: 0 };

async function streamed(model) {
  const stream = streamText({ model, ...request });
  const kinds = [];
  let text = "";
  for await (const part of stream.fullStream) {
    if (part.type === "error") throw part.error;
    if (kinds.at(-1) !== part.type) kinds.push(part.type);
    if (part.type === "text-delta") text += part.text;
  }
  return { text, kinds, usage: (await stream.usage).outputTokens };
}

const whole = await generateText({ model: compatible("sprig"), ...request });
const chat = await generateText({ model: openai.chat("sprig"), ...request });
const response = await generateText({ model: openai("sprig"), prompt, maxOutputTokens: 24 });
const search = { policy: "rebase", width: 2, seed: 11 };
const searchReply = await generateText({
  model: compatible("sprig"), prompt, maxRetries: 0, providerOptions: { hedgerow: { search } },
});
const aliased = streamText({ model: compatible("sprig:rebase-2"), prompt, seed: 11 });
console.log(
  JSON.stringify({
    whole: whole.text,
    usage: whole.usage.outputTokens,
    finish_reason: whole.finishReason,
    streamed: await streamed(compatible("sprig")),
    chat: chat.text,
    response: response.text,
    response_streamed: await streamed(openai("sprig")),
    search: searchReply.text,
    aliased: await aliased.text,
  }),
);
