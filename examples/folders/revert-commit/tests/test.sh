#!/bin/sh
# Only objects and references of the repository are used: its configuration and hooks could run programs.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
set -e
export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null
mkdir -p /tmp/checked
cp -R /workspace/repository/.git /tmp/checked/.git
cd /tmp/checked
rm -rf .git/config .git/config.worktree .git/hooks .git/info .git/objects/info/alternates .git/index
git init -q
git symbolic-ref HEAD refs/heads/main
git log --format=%s main > /tmp/subjects.txt
head -n 1 /tmp/subjects.txt | grep -q 'Count each item once'
tail -n +2 /tmp/subjects.txt | cmp /tests/subjects.txt -
git reset -q --hard main
for name in food.txt furniture.txt office.txt README.md total.sh; do cmp "/tests/tree/$name" "$name"; done
[ "$(git ls-files | wc -l)" -eq 5 ]
echo 1 > /logs/verifier/reward.txt
