"use strict";
// The Markdown of an answer as nodes of the page. An answer cannot run, load or change anything:
// markdown-it shows HTML as text and images as links, and DOMPurify keeps the elements below alone.
const markdown = markdownit({html: false, breaks: true, linkify: true});
markdown.linkify.set({fuzzyLink: false, fuzzyEmail: false});  // only what begins with https://
const KEPT = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "s",
    "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["align", "href", "start"],
  ADD_URI_SAFE_ATTR: ["align", "start"],  // no addresses, as href is
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};

markdown.renderer.rules.image = (tokens, index) => {
  const {escapeHtml} = markdown.utils, image = tokens[index];
  return `<a href="${escapeHtml(image.attrGet("src"))}">image: ${escapeHtml(image.content)}</a>`;
};

// A column's alignment comes as a style.
for (const cell of ["th_open", "td_open"]) {
  markdown.renderer.rules[cell] = (tokens, index, options, env, renderer) => {
    const style = tokens[index].attrGet("style");
    if (style) tokens[index].attrs = [["align", style.replace("text-align:", "")]];
    return renderer.renderToken(tokens, index, options);
  };
}

// Formulas stay as they were written: they would lose their backslashes.
const FORMULA = /\\\(.{1,2000}?\\\)|\\\[.{1,2000}?\\\]|\$\$.{1,2000}?\$\$/sy;
markdown.inline.ruler.before("escape", "formula", (place, silent) => {
  FORMULA.lastIndex = place.pos;
  const found = FORMULA.exec(place.src);
  if (!found) return false;
  if (!silent) place.pending += found[0];
  place.pos += found[0].length;
  return true;
});

function rendered(text) {
  const nodes = DOMPurify.sanitize(markdown.render(text), KEPT);
  for (const link of nodes.querySelectorAll("a[href]")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
    link.title = link.href;
  }
  for (const block of nodes.querySelectorAll("blockquote, h1, h2, h3, h4, h5, h6, ol, p, table, ul")) block.dir = "auto";
  for (const table of nodes.querySelectorAll("table")) {
    const box = document.createElement("div");
    box.className = "scroll";
    table.replaceWith(box);
    box.append(table);
  }
  return nodes;
}
