"""What an episode earned and what each of its completions is worth: process, speed, perf, advantage, weight."""
