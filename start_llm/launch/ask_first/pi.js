// Asks before a tool of pi acts. `start_llm launch pi` writes this file; changes to it do not stay.
const READS = new Set(["read", "grep", "find", "ls"]);
const FLAG = "dangerously-skip-permissions";

export default function (pi) {
	const allowed = new Set();
	pi.registerFlag(FLAG, { description: "Run every tool without a question", type: "boolean", default: false });
	pi.on("tool_call", async (event, ctx) => {
		const tool = event.toolName;
		if (READS.has(tool) || allowed.has(tool) || pi.getFlag(FLAG)) return undefined;
		if (!ctx.hasUI) {
			return { block: true, reason: `Nobody is there to be asked about ${tool}. The user can start pi with --${FLAG}.` };
		}
		const act = event.input.command ?? event.input.path ?? JSON.stringify(event.input);
		const always = `Yes, and every ${tool} until pi ends`;
		const choice = await ctx.ui.select(`Allow ${tool}?\n\n${act}`, ["Yes", always, "No"]);
		if (choice === always) allowed.add(tool);
		return choice === "Yes" || choice === always ? undefined : { block: true, reason: "The user said no." };
	});
}
