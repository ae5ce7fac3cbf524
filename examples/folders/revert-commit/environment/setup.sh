#!/bin/sh
# Writes a repository of twelve commits with fixed authors and dates.
set -e
mkdir -p /workspace/repository
cd /workspace/repository
export GIT_AUTHOR_NAME=Ada GIT_AUTHOR_EMAIL=ada@example.org GIT_COMMITTER_NAME=Ada GIT_COMMITTER_EMAIL=ada@example.org
export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null
git init -q -b main .
git config user.name Ada
git config user.email ada@example.org

number=0
commit() {
    number=$((number + 1))
    git add -A
    export GIT_AUTHOR_DATE="2026-03-$(printf %02d $number)T12:00:00Z"
    GIT_COMMITTER_DATE=$GIT_AUTHOR_DATE git commit -q -m "$1"
}

printf 'bread 320\nmilk 115\n' > food.txt
cat > total.sh <<'END'
#!/bin/sh
# Prints the sum of all prices, in cents.
cat *.txt | awk '{ total += $2 } END { print total + 0 }'
END
commit "Add food and the total"
printf 'pen 90\nink 740\n' > office.txt
commit "Add office supplies"
sed -i 's/milk 115/milk 129/' food.txt
commit "Raise the price of milk"
GIT_COMMITTER_DATE=2026-03-03T12:00:00Z git tag -a -m "First version" v1
printf 'tea 455\n' >> food.txt
commit "Add tea"
printf '# Price lists\n\nOne file for each department.\n' > README.md
commit "Describe the files"
cat > total.sh <<'END'
#!/bin/sh
# Prints the sum of all prices, in cents.
cat -- *.txt | awk '{ total += $2 } END { print total + 0 }'
END
commit "Accept file names that begin with a dash"
printf 'chair 8900\n' > furniture.txt
commit "Add furniture"
cat > total.sh <<'END'
#!/bin/sh
# Prints the sum of all prices, in cents. Each item counts once.
cat -- *.txt | sort -u -k 2,2 | awk '{ total += $2 } END { print total + 0 }'
END
commit "Count each item once"
printf 'stool 455\n' >> furniture.txt
commit "Add a stool"
sed -i 's/ink 740/ink 690/' office.txt
commit "Lower the price of ink"
printf 'lamp 90\n' >> furniture.txt
commit "Add a lamp"
printf '\nPrices are in cents.\n' >> README.md
commit "Say which unit prices have"
