#!/usr/bin/env bash
# Makes the secrets that deploy/compose.yaml mounts, and deploy/.env, which says where they are.  What is there already is
# left as it is: remove a file to have a new one.
#
#   bash deploy/compose/make_secrets.sh [FOLDER]     (default: deploy/compose/secrets)
#
# The folder is for its owner only.  The files in it can be read by anyone who gets in: each container reads its own as
# another user (65532, 65534, 472), and sees no other file of the folder.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-$here/secrets}
command -v openssl >/dev/null || { echo "make_secrets: openssl is missing: install it and run this again." >&2; exit 2; }

mkdir -p "$folder"
chmod 0700 "$folder"
folder=$(cd "$folder" && pwd)

# Its content comes from standard input; no secret is ever an argument of a program.
keep() {
    local file=$folder/$1
    if [ -s "$file" ]; then cat >/dev/null; return; fi
    (umask 077 && cat >"$file.new")
    chmod 0444 "$file.new"
    mv "$file.new" "$file"
    echo "made $file"
}

openssl rand -hex 24 | keep probe_token
openssl rand -hex 24 | keep operator_token
openssl rand -hex 24 | keep alertmanager_token
openssl rand -hex 16 | keep grafana_password
# The operator may do all; Alertmanager may only ask for mitigations, which mitigation.mode has the last word on.
printf '[{"name": "operator", "token": "%s", "scopes": ["read", "mitigate", "admin"]},\n {"name": "alertmanager", "token": "%s", "scopes": ["mitigate"]}]\n' \
    "$(cat "$folder/operator_token")" "$(cat "$folder/alertmanager_token")" | keep api_tokens

# Each token is read from its file, so that none is an argument here either.
for name in operator alertmanager; do
    grep -qFf "$folder/${name}_token" "$folder/api_tokens" || {
        echo "make_secrets: $folder/api_tokens does not hold ${name}_token, and Flipwatch would answer 401 to it: remove" \
            "api_tokens and run this again, or put the token into it." >&2
        exit 1
    }
done

if [ ! -e "$here/../.env" ]; then
    # Single quotes: nothing in the path is read as a variable.
    { printf "FLIPWATCH_SECRETS='%s'\n" "$folder"; sed "/^FLIPWATCH_SECRETS=/d" "$here/env.example"; } >"$here/../.env"
    echo "made $(cd "$here/.." && pwd)/.env"
elif ! grep -qF "$folder" "$here/../.env"; then
    echo "deploy/.env does not name $folder: set FLIPWATCH_SECRETS there."
fi
echo "For the command line: export FLIPWATCH_TOKEN=\$(cat '$folder/operator_token')"
