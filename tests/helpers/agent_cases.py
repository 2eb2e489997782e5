"""What coding agents are asked for, and what their model does; needs no vmkv."""

TASK = "Make a file of three words, and count them."
FILE = "made.txt"
#: For the agent's shell; the model answers if the result has the second text.
COMMAND, RESULT = f"echo six times seven > {FILE}; wc -w {FILE}", f"3 {FILE}"
ANSWER = f"The file {FILE} has three words."
