// Every word of the page, in English and Chinese. {name} is filled in; a test compares the two lists.

export const STRINGS = {
  en: {
    language: "中文",
    skip: "Go to the question", kind: "MiA · the whole book before the page", heading: "Ask a book",
    key: "Key", keyLabel: "API key", keyUse: "Use",
    keyNote: "Sent with each request, kept in this tab until it is closed, and nowhere else.",
    keyKept: "The key is used from now on.", keyGone: "No key is used.",
    collection: "Collection", add: "Add a text", noCollections: "none yet",
    start: "This server holds no text yet. Add one: a novel, a report, minutes of meetings.",
    remove: "Delete…", removeSure: "Delete “{title}” for good?", removed: "Deleted.",
    about: "{chunks} chunks in {sessions} sessions, {books}; summaries: {summarizer}",
    book: "one text", books: "{n} texts",
    question: "Question", placeholder: "What would you like to know?", ask: "Ask",
    askNote: "Enter asks, Shift+Enter starts a new line, Escape stops.",
    stop: "Stop", options: "Options", how: "Search", dense: "by meaning", fused: "by meaning and words", lexical: "by words",
    sigmaBy: "Signature σ", coverage: "that covers the pool", firstK: "the pool's first sessions", noSigma: "none",
    k: "Hits", answerBy: "Answer", oneShot: "in one go", agent: "by the agent, step by step", noAnswer: "none, only search",
    empty: "Write a question first.", noBook: "Add a text first: there is nothing to ask yet.",
    searching: "Searching…", stopped: "Stopped.",
    found: "{hits} hits in {seconds} s. The question lit up {pool} of {all} sessions; σ is {picks} of them.",
    foundPlain: "{hits} hits in {seconds} s.", foundNone: "Nothing was found. Ask in other words, or search by meaning.",
    answer: "Answer", thinking: "Reading…", cited: "From: ", noReply: "The model answered with nothing.",
    whole: "The whole reply", usage: "{model}: {all} tokens, {in} read and {out} written",
    passages: "Passages the answer was read from", step: "Step {n}", stepSearch: "looks for: ",
    sigmaGained: "σ gained {names}", sigmaLost: "σ lost {names}", sigmaStayed: "σ stayed", sigmaStart: "σ starts with {names}",
    stepFound: "{n} chunks found", decided: "Decision", refine: "look further", finish: "enough: answer",
    stepFailed: "The update failed ({why}); nothing changed.", showStep: "show on the map", backToSearch: "show it on the map again",
    map: "The map", mapLabel: "Map of {title}: {n} sessions. Arrow keys move, Enter opens a session.",
    legSession: "session, as wide as it has chunks", legPool: "pool: brighter where the question finds more",
    legSigma: "signature σ, numbered as chosen", legBefore: "hits before σ", legAfter: "hits with σ", legHits: "hits",
    sessionOf: "Session {n} of {all}", chunks: "{n} chunks", chunk: "1 chunk", inPool: "in the pool", notPool: "not in the pool",
    brightness: "E1 {score}", chosenAs: "chosen as {n} of σ", hitsHere: "hits: {before} before, {after} with σ",
    noSummary: "No summary yet.", close: "Close",
    sigmaTitle: "Signature σ", sigmaWhy: "The summaries that the second search reads beside the question, each with what it adds to σ.",
    sigmaGiven: "The summaries that the second search reads beside the question.",
    gain: "adds {n}", termQuery: "fits the question", termCover: "covers the pool", termSpread: "adds something new",
    hitsTitle: "Hits", before: "Question alone", after: "Question and σ", hitsOnly: "Hits",
    hitsNote: "What E1 finds for the question alone, and what the search finds with σ; each mark tells the change of rank.",
    same: "same", isNew: "new", up: "up {n}", down: "down {n}", gone: "left the list",
    sameRank: "rank {n}, as before", newRank: "not in the list before", upRank: "rank {old} before", unchanged: "σ changed nothing in this list.",
    noText: "(the text is not in the reply)",
    addTitle: "Add a text", name: "Title", file: "A .txt file", paste: "or paste the text", addGo: "Add",
    cancel: "Cancel", into: "add it to “{title}” as one more text",
    size: "{n} characters", sizeLong: "{n} characters; this may take a few minutes", untitled: "Untitled",
    emptyText: "Choose a file or paste a text first.", badFile: "This file is not plain text (UTF-8, UTF-16 or GB18030). Save it as .txt and choose it again.",
    sending: "Adding: {share} %", sendingWait: "Adding: {share} %; the server is busy, going on in {n} s", sendingLeft: "Adding: {share} %, about {n} s left",
    addStopped: "Stopped. What was added until then can be asked.", addedPart: "Only {share} % was added before this happened; that much can be asked.",
    added: "Added. Ask away.",
    errPage: "Something in this page failed. Reload it; if that does not help, report these words.",
    errAway: "The server does not answer. See that it still runs, then try again.",
    errNoKey: "This server asks for a key. Open “Key” above and enter yours.",
    errKey: "The server does not accept this key. Check it, or ask for a new one.",
    errRole: "This key may not do that. Ask for one with the right to write.",
    errGone: "This is not on the server any more. The list above has been read again.",
    errConflict: "There is such a text already. Choose another title.",
    errLarge: "This is more than the server takes at once. Make it shorter, or ask for a higher limit.",
    errBusy: "The server is busy. Try again in a moment.", errBusyFor: "The server is busy. Try again in {n} s.",
    errStarting: "The server is still starting; this page goes on as soon as it is ready.",
    errModel: "The language model does not answer now. Searching works without it: under Options set Answer to none.",
    errDown: "The server cannot do this now. Try again in a moment.",
    errAsked: "The server does not take this.", errServer: "The server failed ({status}). Try again; its log says more.",
  },
  zh: {
    language: "English",
    skip: "跳到提问", kind: "MiA · 先通览全书，再找那一页", heading: "问一本书",
    key: "密钥", keyLabel: "API 密钥", keyUse: "使用",
    keyNote: "随每次请求发送，只保存在本标签页中，关闭即清除。",
    keyKept: "从现在起使用这个密钥。", keyGone: "不再使用密钥。",
    collection: "文库", add: "添加文本", noCollections: "还没有",
    start: "服务器上还没有文本。请添加一份：小说、报告、会议记录都可以。",
    remove: "删除……", removeSure: "确定永久删除“{title}”？", removed: "已删除。",
    about: "{chunks} 个片段，{sessions} 个会话段，{books}；摘要：{summarizer}",
    book: "一份文本", books: "{n} 份文本",
    question: "问题", placeholder: "想知道什么？", ask: "提问",
    askNote: "回车提问，Shift+回车换行，Esc 停止。",
    stop: "停止", options: "选项", how: "检索", dense: "按语义", fused: "语义加词语", lexical: "按词语",
    sigmaBy: "签名 σ", coverage: "覆盖候选池", firstK: "池中最前几段", noSigma: "不用",
    k: "结果数", answerBy: "回答", oneShot: "一次作答", agent: "智能体逐步作答", noAnswer: "不作答，只检索",
    empty: "请先写下问题。", noBook: "请先添加文本，现在还没有可问的内容。",
    searching: "正在检索……", stopped: "已停止。",
    found: "{seconds} 秒找到 {hits} 条。问题点亮了 {all} 段中的 {pool} 段，σ 从中选了 {picks} 段。",
    foundPlain: "{seconds} 秒找到 {hits} 条。", foundNone: "没有找到。换个说法，或改为按语义检索。",
    answer: "回答", thinking: "正在阅读……", cited: "依据：", noReply: "模型没有给出回答。",
    whole: "完整回复", usage: "{model}：共 {all} 个词元，读入 {in}，写出 {out}",
    passages: "作答时读到的段落", step: "第 {n} 步", stepSearch: "查找：",
    sigmaGained: "σ 新增 {names}", sigmaLost: "σ 去掉 {names}", sigmaStayed: "σ 未变", sigmaStart: "σ 起初为 {names}",
    stepFound: "找到 {n} 个片段", decided: "决定", refine: "继续查找", finish: "足够，作答",
    stepFailed: "更新失败（{why}），状态未变。", showStep: "在地图上显示", backToSearch: "重新显示在地图上",
    map: "地图", mapLabel: "《{title}》的地图，共 {n} 段。方向键移动，回车打开一段。",
    legSession: "会话段，宽度为片段数", legPool: "候选池：越亮，与问题越相关",
    legSigma: "签名 σ，数字为入选次序", legBefore: "用 σ 之前的结果", legAfter: "用 σ 之后的结果", legHits: "结果",
    sessionOf: "第 {n} 段，共 {all} 段", chunks: "{n} 个片段", chunk: "1 个片段", inPool: "在候选池中", notPool: "不在候选池中",
    brightness: "E1 {score}", chosenAs: "σ 的第 {n} 个", hitsHere: "结果：之前 {before} 条，之后 {after} 条",
    noSummary: "还没有摘要。", close: "关闭",
    sigmaTitle: "签名 σ", sigmaWhy: "第二次检索与问题一同读入的摘要，以及每段为 σ 增加的值。",
    sigmaGiven: "第二次检索与问题一同读入的摘要。",
    gain: "增加 {n}", termQuery: "切合问题", termCover: "覆盖候选池", termSpread: "带来新内容",
    hitsTitle: "结果", before: "只用问题", after: "问题加 σ", hitsOnly: "结果",
    hitsNote: "E1 只凭问题找到的，与加上 σ 之后找到的；标记为名次的变化。",
    same: "不变", isNew: "新", up: "升 {n}", down: "降 {n}", gone: "落榜",
    sameRank: "名次仍为 {n}", newRank: "之前不在列", upRank: "之前第 {old}", unchanged: "σ 没有改变这份名单。",
    noText: "（回复中没有这段文字）",
    addTitle: "添加文本", name: "标题", file: ".txt 文件", paste: "或粘贴文本", addGo: "添加",
    cancel: "取消", into: "作为又一份文本加入“{title}”",
    size: "{n} 个字符", sizeLong: "{n} 个字符，可能要几分钟", untitled: "无题",
    emptyText: "请先选择文件或粘贴文本。", badFile: "这不是纯文本文件（UTF-8、UTF-16 或 GB18030）。请另存为 .txt 后再选。",
    sending: "正在添加：{share} %", sendingWait: "正在添加：{share} %；服务器正忙，{n} 秒后继续", sendingLeft: "正在添加：{share} %，还需约 {n} 秒",
    addStopped: "已停止。之前添加的部分可以提问。", addedPart: "出错前只添加了 {share} %，这部分可以提问。",
    added: "已添加，请提问。",
    errPage: "页面出错。请刷新；若仍出错，请报告下面的文字。",
    errAway: "服务器没有回应。请确认它仍在运行，然后重试。",
    errNoKey: "服务器需要密钥。请点开上方“密钥”并填入。",
    errKey: "服务器不接受这个密钥。请检查，或申请新的密钥。",
    errRole: "这个密钥无权这样做。请申请有写入权限的密钥。",
    errGone: "服务器上已没有它。上方的列表已重新读取。",
    errConflict: "已有同名文本。请换一个标题。",
    errLarge: "超出了服务器一次能接受的大小。请缩短，或请人提高上限。",
    errBusy: "服务器正忙，请稍后再试。", errBusyFor: "服务器正忙，请在 {n} 秒后再试。",
    errStarting: "服务器还在启动，就绪后本页会自动继续。",
    errModel: "语言模型现在没有回应。检索不需要它：在“选项”中把“回答”设为不作答。",
    errDown: "服务器暂时无法处理，请稍后再试。",
    errAsked: "服务器不接受这个请求。", errServer: "服务器出错（{status}）。请重试；详情见服务器日志。",
  },
};

const KEPT = "mia-language";
let language = kept() ?? (/^zh\b/i.test(navigator.language) ? "zh" : "en");

function kept() {
  try {
    const name = localStorage.getItem(KEPT);
    return name in STRINGS ? name : null;
  } catch {
    return null; // storage may be switched off
  }
}

export const currentLanguage = () => language;

/** Return a string of the page in the chosen language, with {names} filled in. */
export const t = (name, values = {}) =>
  STRINGS[language][name].replace(/\{(\w+)\}/g, (_, key) => String(values[key] ?? ""));

/** Write a count as the chosen language does. */
export const count = (value) => value.toLocaleString(language);

/** Fill in the words of the page's fixed parts. */
export function writeWords() {
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
  for (const node of document.querySelectorAll("[data-t]")) node.textContent = t(node.dataset.t);
  for (const node of document.querySelectorAll("[data-t-placeholder]")) node.placeholder = t(node.dataset.tPlaceholder);
  const other = document.getElementById("language");
  other.textContent = t("language");
  other.lang = language === "zh" ? "en" : "zh-CN";
}

/** Change to the other language. */
export function switchLanguage() {
  language = language === "zh" ? "en" : "zh";
  try { localStorage.setItem(KEPT, language); } catch { /* it is asked again next time */ }
}
