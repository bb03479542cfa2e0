"""From a neutral request to the choices to generate: prechecks, prompts, sampling, grammar."""
