# Completion of ds2 for bash, by `ds2 completion bash`:
#     ds2 completion bash > ~/.local/share/bash-completion/completions/ds2
_ds2() {
    local current="${COMP_WORDS[COMP_CWORD]}" option="${COMP_WORDS[COMP_CWORD-1]}" prefix="" word words="" values=""
    local command="${COMP_WORDS[*]:1:COMP_CWORD-1}"
    if [[ "$current" == "=" ]]; then  # readline splits KEY=VALUE into three words
        prefix="$option=" current=""
    elif [[ "$option" == "=" ]]; then
        prefix="${COMP_WORDS[COMP_CWORD-2]}="
    fi
    [[ -n "$prefix" ]] && option="${prefix%=}"
# THE CASES OF ALL COMMANDS
    COMPREPLY=()
    if [[ -n "$values" ]]; then
        COMPREPLY=($(compgen -W "$values" -- "$current"))
        return
    fi
    for word in $(compgen -W "$words" -- "$prefix$current"); do
        [[ -z "$prefix$current" && "$word" == @(-*|*=|decode=*|alphabet=*) ]] || COMPREPLY+=("${word#"$prefix"}")
    done
    [[ "${COMPREPLY[*]}" == *= ]] && compopt -o nospace
}
complete -o default -F _ds2 ds2
